//! Warm starts: a Python that has imported already is forked for every attempt.
//!
//! The zygote forks an attempt's supervisor together with its agent, see `zygote.py`. What a supervisor is to its agent
//! does not change: the agent is its child. Where anything is not as it should be, an attempt is started cold.
//!
//! * [`command`] — which commands can be started warm. Pure.
//! * [`process`] — the zygote as a process, and what is said with it.

pub mod command;
mod process;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use self::command::{Cold, Interpreter, check};
use self::process::{Birth, Process};
use crate::config::ZygoteConfig;
use crate::supervisor::record::Command;
use crate::work_dir::AttemptDir;

/// Whatever kills zygotes is not to be helped by starting more of them at once.
const BETWEEN_STARTS: Duration = Duration::from_secs(1);

/// The controller's handle on its zygote, which ends when this is dropped. Only the task behind it touches the process:
/// no locks, and one fork at a time.
#[derive(Debug)]
pub struct Zygote {
    interpreter: Interpreter,
    births: mpsc::Sender<(Birth, oneshot::Sender<i32>)>,
    midwife: AbortHandle,
    /// Reasons for cold starts that have been logged.
    told: Mutex<HashSet<String>>,
}

/// A supervisor that was forked and waits for its orders.
#[derive(Debug)]
pub struct Forked {
    /// Its process number. It is not our child.
    pub pid: i32,
    /// Its standard input.
    pub stdin: pipe::Sender,
    /// Its standard output.
    pub stdout: pipe::Receiver,
}

impl Zygote {
    /// Begins with the imports. `None`, with the reason in the log, where there is no Python for it. Call it inside a
    /// runtime.
    #[must_use]
    pub fn start(config: &ZygoteConfig, python: &str, cwd: &Path) -> Option<Self> {
        let python = config.python.as_deref().unwrap_or(python).to_owned();
        let found = Interpreter::find(&python, std::env::var_os("PATH").as_deref(), cwd);
        let interpreter = usable(found, &python).inspect_err(|problem| without(problem)).ok()?;
        let (births, waiting) = mpsc::channel(64);
        let midwife = tokio::spawn(attend(config.clone(), python, waiting)).abort_handle();
        Some(Self { interpreter, births, midwife, told: Mutex::default() })
    }

    /// Forks the supervisor of an attempt, with its agent waiting. `None` where the attempt must be started cold.
    /// Waits for the imports if need be.
    pub async fn supervisor(&self, program: Option<&Path>, dir: &AttemptDir, agent: &Command) -> Option<Forked> {
        match check(agent, &self.interpreter) {
            Ok(()) => {}
            Err(Cold::OtherProgram) => return None,
            Err(Cold::Because(reason)) => {
                if self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(reason.clone()) {
                    tracing::warn!(argv = ?agent.argv, "the zygote is not used for an agent: {reason}");
                }
                return None;
            }
        }
        let (birth, stdin, stdout) =
            prepare(program, dir).inspect_err(|error| tracing::warn!(%error, "cannot prepare a warm start")).ok()?;
        let (answer, answered) = oneshot::channel();
        self.births.send((birth, answer)).await.ok()?;
        Some(Forked { pid: answered.await.ok()?, stdin, stdout })
    }

    /// Ends it now. Starts that wait for it become cold ones.
    pub fn end(&self) {
        self.midwife.abort();
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        self.end();
    }
}

fn without(problem: &str) {
    tracing::warn!("there is no zygote, every agent is started cold: {problem}");
}

fn usable(interpreter: Option<Interpreter>, python: &str) -> Result<Interpreter, String> {
    let interpreter = interpreter.ok_or_else(|| format!("there is no {python:?}"))?;
    if interpreter.is_script() {
        return Err(format!(
            "{interpreter} is a script that starts Python; name the interpreter itself in zygote.python and in the agents' \
             commands (it says where it is by -c 'import sys; print(sys.executable)')"
        ));
    }
    Ok(interpreter)
}

fn prepare(program: Option<&Path>, dir: &AttemptDir) -> io::Result<(Birth, pipe::Sender, pipe::Receiver)> {
    let (stdin, to) = io::pipe()?;
    let (from, stdout) = io::pipe()?;
    let stderr = File::create(dir.supervisor_log())?;
    // The running program itself, even where its file has been replaced since.
    let own = program.is_none().then(|| File::open("/proc/self/exe")).transpose()?;
    let program = program.map(Path::as_os_str).unwrap_or_default();
    let words = [program, OsStr::new("agl"), OsStr::new("supervise"), dir.path().as_os_str()];
    let birth = Birth {
        command: words.map(OsStr::as_bytes).join(&0),
        streams: [stdin.into(), stdout.into(), stderr.into()],
        own,
    };
    Ok((birth, pipe::Sender::from_owned_fd(to.into())?, pipe::Receiver::from_owned_fd(from.into())?))
}

/// Keeps a zygote and has it fork, until one says that it cannot be used. When this ends, whoever waits starts cold.
async fn attend(config: ZygoteConfig, python: String, mut births: mpsc::Receiver<(Birth, oneshot::Sender<i32>)>) {
    loop {
        let started = Instant::now();
        let mut process = match Process::start(&config, &python).await {
            Ok(process) => process,
            Err(problem) => {
                without(&problem);
                return;
            }
        };
        tracing::info!(imports = ?config.imports, seconds = started.elapsed().as_secs_f64(), "zygote ready");
        loop {
            tokio::select! {
                birth = births.recv() => {
                    let Some((birth, answer)) = birth else { return };
                    match process.fork(&birth).await {
                        // Whoever asked may be gone: a supervisor that gets no orders ends.
                        Ok(pid) => drop(answer.send(pid)),
                        Err(problem) => {
                            tracing::warn!("a zygote is given up and started again: {problem}");
                            break;
                        }
                    }
                }
                ended = process.ended() => {
                    let how = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
                    tracing::warn!("the zygote ended and is started again: {how}");
                    break;
                }
            }
        }
        drop(process);
        tokio::time::sleep(BETWEEN_STARTS.saturating_sub(started.elapsed())).await;
    }
}
