//! A run as a person sees it: a progress bar on a terminal, lines elsewhere, and a row of a table for every step.

use std::io::IsTerminal;
use std::time::Duration;

use agl_trainer::Progress;
use agl_trainer::metrics::StepMetrics;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::note;

/// Shows a run on standard error.
pub struct RunView {
    bar: Option<ProgressBar>,
    rows: usize,
    reward: Option<f64>,
    validation: Option<f64>,
}

const HEADINGS: &str = "  step  reward  rows/rollout  calls/rollout     loss  grad norm    KL     sample s  update s";

impl RunView {
    /// A view of a run that has not begun.
    #[must_use]
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            let style = "{spinner} {bar:32} step {pos}/{len}  {msg}  [{elapsed_precise}, {eta} to go]";
            if let Ok(style) = ProgressStyle::with_template(style) {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, rows: 0, reward: None, validation: None }
    }

    /// Shows what has happened.
    pub fn show(&mut self, progress: Progress) {
        match progress {
            Progress::Started { run_id, done, total } => {
                self.say(&if done == 0 {
                    format!("{run_id}: {total} steps")
                } else {
                    format!("{run_id}: going on after step {done} of {total}")
                });
                if let Some(bar) = &self.bar {
                    bar.set_length(total);
                    bar.set_position(done);
                    bar.reset_eta();
                }
            }
            Progress::Rollout { is_train, done, of, .. } => {
                let kind = if is_train { "rollouts" } else { "validation rollouts" };
                self.status(&format!("{kind} {done}/{of}"));
            }
            Progress::Updating { .. } => self.status("updating the policy"),
            Progress::Step(metrics) => {
                self.reward = metrics.get("reward/mean").or(self.reward);
                if self.rows.is_multiple_of(20) {
                    self.say(HEADINGS);
                }
                self.rows += 1;
                self.say(&row(&metrics));
                if let Some(bar) = &self.bar {
                    bar.set_position(metrics.step);
                }
            }
            Progress::Validation { step, evaluation } => {
                self.validation = Some(evaluation.reward);
                self.say(&format!(
                    "{step:6}  validation reward {:.3} ± {:.3} on {} rollouts, {:.1} calls per solved one{}",
                    evaluation.reward,
                    evaluation.standard_error,
                    evaluation.rollouts,
                    evaluation.calls_per_solved,
                    if evaluation.excluded > 0 { format!(", {} left out", evaluation.excluded) } else { String::new() },
                ));
            }
            Progress::Checkpoint { step, path } => self.say(&format!("{step:6}  checkpoint {}", path.display())),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn status(&self, doing: &str) {
        if let Some(bar) = &self.bar {
            let value = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.3}"));
            bar.set_message(format!("reward {}  val {}  {doing}", value(self.reward), value(self.validation)));
        }
    }

    fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => note(text),
        }
    }
}

impl Default for RunView {
    fn default() -> Self {
        Self::new()
    }
}

fn row(metrics: &StepMetrics) -> String {
    let value = |name: &str, digits: usize| {
        metrics.get(name).map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
    };
    format!(
        "{:6}  {:>6}  {:>12}  {:>13}  {:>7}  {:>9}  {:>8}  {:>7}  {:>8}",
        metrics.step,
        value("reward/mean", 3),
        value("rollouts/rows_per_rollout", 2),
        value("rollouts/calls_per_rollout", 2),
        value("actor/loss", 3),
        value("actor/grad_norm", 2),
        value("actor/approx_kl", 5),
        value("timing/sampling_seconds", 1),
        value("timing/update_seconds", 1),
    )
}
