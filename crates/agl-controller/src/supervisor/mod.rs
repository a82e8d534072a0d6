//! The supervisor: one small process per attempt, which owns the agent.
//!
//! It is the controller's program started again as `… supervise ATTEMPT_DIR`. It leads a session of its own, so that a
//! terminal's Ctrl-C and the death of the controller pass it by, and it is the subreaper of all that the agent starts,
//! so that nothing escapes by double-forking. Agent first, then the evaluator; the outcome goes to `exit.json`.
//!
//! SIGTERM asks it to end the agent. The controller's pipes may break at any time and change nothing.
//!
//! * [`record`] — what is said between controller and supervisor.
//! * [`family`] — a process and everything that came from it.
//! * [`isolation`] — walls around the agent.
//! * [`warm`] — an agent that a zygote forked, which waits for its command.
//! * [`log`] — an output stream kept up to a limit.

pub mod family;
pub mod isolation;
pub mod log;
pub mod record;
pub mod warm;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::family::Family;
use self::isolation::Walls;
use self::record::{Answer, Command, End, Event, ExitRecord, NotStarted, Spec};
use self::warm::WarmAgent;
use crate::process_id::ProcessId;
use crate::work_dir::{AttemptDir, write_record};

/// How long the evaluator waits for the controller's word.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// Runs the supervisor of the attempt whose folder is `dir`. Call it before any async runtime or thread is started.
#[must_use]
pub fn main(dir: &Path) -> ExitCode {
    let dir = AttemptDir::new(dir.to_owned());
    let supervised = prepare_process()
        .and_then(|()| tokio::runtime::Builder::new_current_thread().enable_all().build())
        .and_then(|runtime| runtime.block_on(supervise(&dir)));
    match supervised {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&dir, &error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn complain(dir: &AttemptDir, message: &str) {
    // Standard error is `supervisor.log`.
    use std::io::Write;
    let _ = writeln!(io::stderr(), "agl supervisor of {}: {message}", dir.path().display());
}

fn prepare_process() -> io::Result<()> {
    // Fails where we lead a group already, as when started from a shell; the session is then that of the shell.
    let _ = nix::unistd::setsid();
    // The agent runs under the same user: it must not read the evaluator's key out of our memory.
    nix::sys::prctl::set_dumpable(false)?;
    nix::sys::prctl::set_child_subreaper(true)?;
    Ok(())
}

/// The controller at the other end of the pipes, or its absence.
struct Controller {
    lines: Lines<BufReader<pipe::Receiver>>,
    events: pipe::Sender,
}

impl Controller {
    fn at_our_pipes() -> io::Result<Self> {
        let from = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        let to = pipe::Sender::from_owned_fd(io::stdout().as_fd().try_clone_to_owned()?)?;
        Ok(Self { lines: BufReader::new(from).lines(), events: to })
    }

    async fn tell(&mut self, event: &Event) {
        let Ok(mut line) = serde_json::to_vec(event) else { return };
        line.push(b'\n');
        // A broken pipe: the controller is gone, and its successor reads the records.
        let _ = self.events.write_all(&line).await;
    }

    async fn answer(&mut self) -> Answer {
        let line = tokio::time::timeout(ANSWER_PATIENCE, self.lines.next_line()).await;
        match line {
            Ok(Ok(Some(line))) => serde_json::from_str(&line).unwrap_or(Answer::Go),
            _ => Answer::Go,
        }
    }
}

async fn supervise(dir: &AttemptDir) -> io::Result<()> {
    let mut controller = Controller::at_our_pipes()?;
    let outcome = attempt(dir, &mut controller).await;
    if let Err(error) = &outcome {
        controller.tell(&Event::Failed { message: error.to_string() }).await;
    }
    outcome
}

async fn attempt(dir: &AttemptDir, controller: &mut Controller) -> io::Result<()> {
    let mut stop = signal(SignalKind::terminate())?;
    let Some(line) = controller.lines.next_line().await? else {
        return Err(io::Error::other("the controller died before it said what to run"));
    };
    let spec: Spec = serde_json::from_str(&line)?;
    // First we say that we exist, then we look whether we were given up; a controller that gives up an attempt does it
    // in the opposite order. One of the two always sees the other.
    write_record(&dir.supervisor(), &ProcessId::own())?;
    if dir.abandoned().exists() {
        return Err(io::Error::other("a later controller gave this attempt up before it began"));
    }
    std::fs::write(dir.input(), spec.input.to_string())?;
    let grace = Duration::try_from_secs_f64(spec.kill_grace_seconds).unwrap_or(Duration::from_secs(5));
    let limit = spec.log_limit_bytes;

    let started = Instant::now();
    let agent = match start(&spec, dir).await {
        Ok((family, walls)) => {
            if let Err(error) = write_record(&dir.agent(), &ProcessId::of(family.pid())) {
                // Without it nobody could find the agent: it must not go on.
                family.end(Duration::ZERO).await?;
                return Err(error);
            }
            controller.tell(&Event::Started { pid: family.pid() }).await;
            for message in walls.iter().flat_map(|walls| walls.notes.clone()) {
                controller.tell(&Event::Note { message }).await;
            }
            let mut end = run(family, &spec.agent, grace, &mut stop, started).await?;
            if let Some(walls) = walls {
                walls.take_down(&mut end).await;
            }
            end
        }
        Err(reason) => End { not_started: Some(reason), ..End::default() },
    };
    let mut record = ExitRecord { agent, evaluator: None };
    if let Some(evaluator) = spec.evaluator.filter(|_| record.agent.not_started.is_none() && !record.agent.stopped) {
        write_record(&dir.agent_end(), &record.agent)?;
        controller.tell(&Event::AgentEnded { end: record.agent.clone() }).await;
        if controller.answer().await == Answer::Go {
            std::fs::write(dir.evaluator_input(), spec.input.to_string())?;
            let evaluator = after_agent(evaluator, &record.agent);
            record.evaluator = Some(evaluate(&evaluator, dir, limit, grace, &mut stop).await?);
        }
    }
    write_record(&dir.exit(), &record)
}

async fn start(spec: &Spec, dir: &AttemptDir) -> Result<(Family, Option<Walls>), NotStarted> {
    let limit = spec.log_limit_bytes;
    match &spec.isolation {
        Some(enclosure) => {
            let (family, walls) = isolation::start(&spec.agent, enclosure, dir, limit).await?;
            Ok((family, Some(walls)))
        }
        None => Ok((start_open(&spec.agent, dir, limit).await?, None)),
    }
}

/// Warm where an agent waits for its command, else cold.
async fn start_open(command: &Command, dir: &AttemptDir, limit: u64) -> Result<Family, NotStarted> {
    let (stdout, stderr) = (dir.stdout(), dir.stderr());
    let warm = match WarmAgent::inherited() {
        Ok(Some(agent)) => Some(Family::begin(agent, command, &stdout, &stderr, limit).await),
        Ok(None) => None,
        Err(error) => Some(Err(error)),
    };
    match warm {
        Some(Ok(family)) => return Ok(family),
        Some(Err(error)) => complain(dir, &format!("the agent is started cold: {error}")),
        None => {}
    }
    Family::start(command, &stdout, &stderr, limit)
}

/// The evaluator's command, with what is known only now.
fn after_agent(mut evaluator: Command, agent: &End) -> Command {
    let code = agent.exit_code().map(|code| code.to_string()).unwrap_or_default();
    evaluator.env.insert("AGL_EXIT_CODE".to_owned(), code);
    evaluator
}

async fn evaluate(
    evaluator: &Command,
    dir: &AttemptDir,
    limit: u64,
    grace: Duration,
    stop: &mut Signal,
) -> io::Result<End> {
    let started = Instant::now();
    match Family::start(evaluator, &dir.evaluator_stdout(), &dir.evaluator_stderr(), limit) {
        Ok(family) => run(family, evaluator, grace, stop, started).await,
        Err(reason) => Ok(End { not_started: Some(reason), ..End::default() }),
    }
}

/// Waits for the process, for its time to pass or for the order to stop, whichever comes first; then ends its family.
async fn run(
    mut family: Family,
    command: &Command,
    grace: Duration,
    stop: &mut Signal,
    started: Instant,
) -> io::Result<End> {
    let limit = match command.timeout_seconds {
        0 => Duration::MAX,
        seconds => Duration::from_secs(seconds),
    };
    let mut end = End::default();
    tokio::select! {
        exited = family.wait() => { exited?; }
        () = sleep(limit) => end.timed_out = true,
        _ = stop.recv() => end.stopped = true,
    }
    end.seconds = started.elapsed().as_secs_f64();
    if let Some(status) = family.end(grace).await? {
        end.code = status.code();
        end.signal = status.signal();
    }
    Ok(end)
}

async fn sleep(duration: Duration) {
    match Instant::now().checked_add(duration) {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
