//! From the request to start a supervisor to its agent's first line and first call: cold, and from a zygote.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agl_controller::supervised::{Step, Supervised};
use agl_controller::supervisor::record::{Command, Spec};
use agl_controller::work_dir::AttemptDir;
use agl_controller::zygote::Zygote;
use anyhow::{Context, ensure};
use serde_json::Value;

use crate::Options;
use crate::figures::Figures;
use crate::model::Model;
use crate::whole::{agent, zygote};

/// What became of one start.
struct Start {
    first_line: Duration,
    imported: Duration,
    first_call: Duration,
}

/// What a row shows of a start.
type Row = fn(&Start) -> Duration;

/// Measures and reports.
pub async fn measure(options: &Options, report: &mut impl Write) -> anyhow::Result<()> {
    let model = Model::start().await?;
    let folder = tempfile::tempdir()?;
    let mother = Zygote::start(&zygote(options)?, "", folder.path()).context("no zygote of this Python")?;
    let mut argv: Vec<String> =
        agent(options, "with_openai.py")?.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let columns = format!("{:>9} {:>9} {:>9} {:>10}", "p50", "p90", "p99", "cold/warm");
    writeln!(report, "\n{:<72} {columns}", "from the request to start it, an agent on openai, ms")?;
    let rows: [(&str, Row); 3] = [
        ("its first line", |start| start.first_line),
        ("its imports are done", |start| start.imported),
        ("its first call arrives", |start| start.first_call),
    ];
    for (name, rows) in [("own certificates", &rows[..]), ("shared certificates", &rows[2..])] {
        let (mut cold, mut warm) = (Vec::new(), Vec::new());
        // The first of each is not counted: one waits for the imports, one fills the caches of the file system.
        for number in 0..=options.count.div_ceil(3) {
            for (kind, zygote, starts) in [("cold", None, &mut cold), ("warm", Some(&mother), &mut warm)] {
                let tag = format!("{kind} {number} {name}");
                let dir = AttemptDir::new(folder.path().join(&tag));
                let start = start(&model, &argv, &tag, &dir, zygote).await?;
                if number > 0 {
                    starts.push(start);
                }
            }
        }
        for (what, of) in rows {
            let [cold, warm] = [&cold, &warm].map(|starts| Figures::of(starts.iter().map(of)));
            let ratio = cold.median() / warm.median();
            writeln!(report, "{:<72} {cold}", format!("  {name}: {what}, cold"))?;
            writeln!(report, "{:<72} {warm} {ratio:>10.1}", format!("  {name}: {what}, from a zygote"))?;
        }
        argv.push("shared".to_owned());
    }
    Ok(())
}

async fn start(
    model: &Model,
    argv: &[String],
    tag: &str,
    dir: &AttemptDir,
    zygote: Option<&Zygote>,
) -> anyhow::Result<Start> {
    let env = [("TAG", tag), ("AGL_OPENAI_BASE_URL", &model.url), ("AGL_KEY", "k")];
    let agent = Command {
        argv: argv.to_vec(),
        env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        cwd: dir.work(),
        timeout_seconds: 60,
    };
    let spec = Spec { agent, evaluator: None, input: Value::Null, log_limit_bytes: 1 << 20, kill_grace_seconds: 1.0 };
    let before = SystemTime::now();
    let mut supervised = Supervised::start(None, dir, &spec, Arc::default(), zygote).await?;
    while !matches!(supervised.next().await, Step::Exited) {}
    let record = supervised.record().map_err(anyhow::Error::msg)?;
    let errors = std::fs::read_to_string(dir.stderr()).unwrap_or_default();
    ensure!(record.agent.code == Some(0), "{tag} failed: {record:?} {errors}");
    let times = std::fs::read_to_string(dir.work().join("times"))?;
    let mut times = times.split_whitespace().map(str::parse);
    let mut since = || -> anyhow::Result<Duration> {
        let at = UNIX_EPOCH + Duration::from_nanos(times.next().context("the agent did not say when")??);
        Ok(at.duration_since(before)?)
    };
    Ok(Start { first_line: since()?, imported: since()?, first_call: model.first_call(tag, before)? })
}
