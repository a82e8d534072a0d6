//! `agl rollouts export`: rollouts as a file of rows, for a notebook or another trainer.
//!
//! * [`rows`] — what a row says: the columns, and how they are read off a rollout.
//! * [`sink`] — rows as lines of JSON or as parquet.
//!
//! A few rollouts are fetched ahead and each is written before the next: however large the store, memory holds a handful.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agl_client::rollouts::EventFormat;
use agl_client::{ClientError, GatewayClient};
use agl_core::event::MODEL_REQUEST;
use agl_core::rollout::{Rollout, RolloutState};
use agl_core::trajectory::Level;
use anyhow::Context;
use clap::{Args, ValueEnum};
use futures_util::{TryStreamExt, stream};
use indicatif::{ProgressBar, ProgressStyle};

use self::rows::{Found, What};
use self::sink::Sink;
use super::LevelArg;
use crate::GatewayArgs;
use crate::failure::{interrupted, usage};
use crate::output::note;
use crate::stack::interrupt;

mod rows;
mod sink;

/// Rollouts listed at once.
const PAGE: usize = 200;
/// Rollouts that may be deleted while they are exported without the next page losing its place.
const REMEMBERED: usize = 8192;
/// Rollouts fetched ahead of the one that is written.
const AHEAD: usize = 4;
/// How long a gateway that is restarted meanwhile is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// See `agl rollouts export --help`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  agl rollouts export rows.parquet --run RUN          the training rows of a run: ids, mask, log-probs, versions, reward
  agl rollouts export calls.jsonl --what calls        every model call, with its whole request and response
  agl rollouts export - --what rollouts | jq .reward  one line per rollout, on standard output

docs/export.md lists the columns.")]
pub struct ExportArgs {
    #[command(flatten)]
    gateway: GatewayArgs,
    /// The file to write, .jsonl or .parquet; `-` is standard output, as jsonl. It appears once it is whole.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What a row is.
    #[arg(long, value_enum, default_value = "sequences")]
    what: What,
    /// The file's format, where its name does not say.
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Only rollouts in this state; may be repeated. Those that have ended if absent.
    #[arg(long = "state", value_parser = super::state)]
    states: Vec<RolloutState>,
    /// Only those of this run.
    #[arg(long)]
    run: Option<String>,
    /// Only this rollout, whatever its state; may be repeated.
    #[arg(long = "id", value_name = "ID", conflicts_with_all = ["states", "run"])]
    ids: Vec<String>,
    /// How calls become sequences.
    #[arg(long, value_enum, default_value = "trajectory")]
    level: LevelArg,
    /// Replace the file if it exists.
    #[arg(long)]
    force: bool,
}

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A JSON object per line.
    Jsonl,
    /// Apache Parquet, compressed with zstd.
    Parquet,
}

/// Writes the file.
pub async fn export(args: ExportArgs) -> anyhow::Result<()> {
    let target = Target::of(&args)?;
    let client = args.gateway.client()?;
    // A person wants to know soon that nobody is there, or that the key is wrong. Later on the gateway may be restarted.
    client.proxy_state().await?;
    let client = client.with_patience(PATIENCE);
    let fresh = target.begin()?;
    let sink = target.sink(fresh.as_ref(), args.what)?;
    let view = View::new(args.ids.len());
    let written = tokio::select! {
        written = write(&args, &client, sink, &view) => written,
        () = interrupt() => Err(interrupted("interrupted; nothing was written")),
    };
    view.bar.finish_and_clear();
    let written = written?;
    if let Some(fresh) = fresh {
        fresh.appear(&target)?;
    }
    let gone = match written.gone {
        0 => String::new(),
        gone => format!("; {gone} were deleted meanwhile"),
    };
    note(format!("{} rows of {} rollouts in {}{gone}", written.rows, written.rollouts, target.name()));
    Ok(())
}

#[derive(Default)]
struct Written {
    rollouts: u64,
    rows: u64,
    gone: u64,
}

async fn write(args: &ExportArgs, client: &GatewayClient, mut sink: Sink, view: &View) -> anyhow::Result<Written> {
    let fetch = async |rollout: Rollout| found(client, rollout, args.what, args.level).await;
    let mut fetched = std::pin::pin!(rollouts(args, client).map_ok(fetch).try_buffered(AHEAD));
    let mut written = Written::default();
    while let Some(found) = fetched.try_next().await? {
        match found {
            Some(found) => {
                written.rollouts += 1;
                // May compress some megabytes.
                let rows = tokio::task::block_in_place(|| sink.write_all(args.what.rows(&found)))?;
                written.rows += rows;
            }
            None => written.gone += 1,
        }
        view.show(&written);
        if sink.reader_is_gone() {
            break;
        }
    }
    tokio::task::block_in_place(|| sink.finish())?;
    Ok(written)
}

/// What is written of a rollout; `None` if it was deleted meanwhile.
async fn found(
    client: &GatewayClient,
    rollout: Rollout,
    what: What,
    level: LevelArg,
) -> Result<Option<Found>, ClientError> {
    let level = if what == What::Calls { Level::Transition } else { level.into() };
    let read = async {
        let sequences = client.sequences(&rollout.rollout_id, level, None).await?;
        let calls = match what {
            What::Calls => client.events(&rollout.rollout_id, Some(MODEL_REQUEST), EventFormat::Raw).await?,
            What::Rollouts | What::Sequences => Vec::new(),
        };
        Ok((sequences, calls))
    };
    match read.await {
        Ok((sequences, calls)) => Ok(Some(Found { rollout, sequences, calls })),
        Err(error) if ClientError::is_not_found(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The rollouts to export, oldest first, page by page.
fn rollouts<'a>(
    args: &'a ExportArgs,
    client: &'a GatewayClient,
) -> impl stream::Stream<Item = Result<Rollout, ClientError>> + 'a {
    let states = match args.states.as_slice() {
        [] => vec![RolloutState::Succeeded, RolloutState::Failed],
        states => states.to_vec(),
    };
    let named = (!args.ids.is_empty()).then(|| args.ids.iter());
    let pages = Pages { client, states, run: args.run.as_deref(), named, behind: VecDeque::new(), done: false };
    stream::try_unfold(pages, Pages::next)
        .map_ok(|page: Vec<Rollout>| stream::iter(page.into_iter().map(Ok)))
        .try_flatten()
}

struct Pages<'a> {
    client: &'a GatewayClient,
    states: Vec<RolloutState>,
    run: Option<&'a str>,
    /// Instead of states and run.
    named: Option<std::slice::Iter<'a, String>>,
    /// What was listed, the last in front: the next page begins behind it.
    behind: VecDeque<String>,
    done: bool,
}

impl Pages<'_> {
    /// A page, and what comes after it.
    async fn next(mut self) -> Result<Option<(Vec<Rollout>, Self)>, ClientError> {
        if self.done {
            return Ok(None);
        }
        let page = match &mut self.named {
            None => self.list().await?,
            Some(named) => {
                let Some(id) = named.next() else { return Ok(None) };
                return Ok(Some((vec![self.client.get_rollout(id).await?.rollout], self)));
            }
        };
        self.done = page.len() < PAGE;
        Ok(Some((page, self)))
    }

    async fn list(&mut self) -> Result<Vec<Rollout>, ClientError> {
        loop {
            let after = self.behind.pop_front();
            match self.client.list_rollouts(&self.states, PAGE, after.as_deref(), self.run).await {
                // Deleted since, and so was all behind it: the one before it will do.
                Err(error) if error.is_not_found() && !self.behind.is_empty() => {}
                listed => {
                    let page = listed?;
                    after.into_iter().for_each(|id| self.behind.push_front(id));
                    page.iter().for_each(|rollout| self.behind.push_front(rollout.rollout_id.clone()));
                    self.behind.truncate(REMEMBERED);
                    return Ok(page);
                }
            }
        }
    }
}

/// Where the rows go.
struct Target {
    /// `None`: standard output.
    path: Option<PathBuf>,
    format: Format,
    force: bool,
}

impl Target {
    fn of(args: &ExportArgs) -> anyhow::Result<Self> {
        if args.file.as_os_str() == "-" {
            if args.format == Some(Format::Parquet) {
                return Err(usage("parquet cannot be written to standard output; name a file"));
            }
            return Ok(Self { path: None, format: Format::Jsonl, force: false });
        }
        let name = args.file.display();
        let format = match (args.format, args.file.extension().and_then(|extension| extension.to_str())) {
            (Some(format), _) => format,
            (None, Some("jsonl" | "json")) => Format::Jsonl,
            (None, Some("parquet")) => Format::Parquet,
            (None, _) => return Err(usage(format!("{name} is neither .jsonl nor .parquet; say which with --format"))),
        };
        if args.file.exists() && !args.force {
            return Err(usage(format!("{name} exists; name another file, or replace it with --force")));
        }
        Ok(Self { path: Some(args.file.clone()), format, force: args.force })
    }

    fn name(&self) -> String {
        self.path.as_ref().map_or_else(|| "standard output".to_owned(), |path| path.display().to_string())
    }

    fn begin(&self) -> anyhow::Result<Option<Fresh>> {
        self.path.as_deref().map(Fresh::beside).transpose()
    }

    fn sink(&self, fresh: Option<&Fresh>, what: What) -> anyhow::Result<Sink> {
        match fresh {
            None => Ok(Sink::stdout(what.columns())),
            Some(fresh) => {
                let file = fresh.file.try_clone().with_context(|| fresh.path.display().to_string())?;
                match self.format {
                    Format::Jsonl => Ok(Sink::jsonl(file, what.columns())),
                    Format::Parquet => Sink::parquet(file, what.columns()),
                }
            }
        }
    }
}

/// The file until it is whole: beside its place, under another name. Removed if it never gets there.
struct Fresh {
    path: PathBuf,
    file: File,
}

impl Fresh {
    fn beside(target: &Path) -> anyhow::Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let path = target.with_file_name(format!(".{name}.{}.new", std::process::id()));
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file })
    }

    /// Puts the file in its place.
    fn appear(self, target: &Target) -> anyhow::Result<()> {
        let Some(place) = &target.path else { return Ok(()) };
        let put = || {
            self.file.sync_all()?;
            if target.force {
                return fs::rename(&self.path, place);
            }
            // Unlike a rename it does not replace what has come there meanwhile.
            fs::hard_link(&self.path, place)
        };
        put().with_context(|| format!("cannot put the file in its place {}", place.display()))
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // Gone already where it was renamed.
        let _gone = fs::remove_file(&self.path);
    }
}

/// How far it has come, on a terminal.
struct View {
    bar: ProgressBar,
    all_known: bool,
}

impl View {
    /// `total` is 0 where nobody knows how many rollouts there are.
    fn new(total: usize) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self { bar: ProgressBar::hidden(), all_known: total > 0 };
        }
        let bar = if total > 0 { ProgressBar::new(total as u64) } else { ProgressBar::new_spinner() };
        let template = match total {
            0 => "{spinner} {pos} rollouts  {msg}  [{elapsed_precise}, {per_sec}]",
            _ => "{spinner} {bar:32} {pos}/{len} rollouts  {msg}  [{elapsed_precise}, {eta} to go]",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, all_known: total > 0 }
    }

    fn show(&self, written: &Written) {
        self.bar.set_position(written.rollouts + if self.all_known { written.gone } else { 0 });
        self.bar.set_message(format!("{} rows", written.rows));
    }
}
