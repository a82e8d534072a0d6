//! A process, its group, and everything that came from it.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpgid};
use tokio::process::Child;
use tokio::task::JoinHandle;

use super::isolation::Ear;
use super::log::{LimitedLog, keep};
use super::record::{Command, NotStarted};
use super::warm::{self, Forked, WarmAgent};
use crate::process_id::descendants;

/// How often a dying family is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// Beyond the grace of its end a process gets so long to die of SIGKILL. One in the hands of a broken driver never does.
const UNKILLABLE: Duration = Duration::from_secs(30);
/// A log whose writers are all dead ends at once; only a stranger who was given it makes us wait this long.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// A running process with its logs. It leads a process group of its own.
pub struct Family {
    leader: Leader,
    group: Pid,
    logs: Vec<JoinHandle<io::Result<()>>>,
    /// Where the child is the stage of an isolated agent: what is heard of the agent itself.
    inside: Option<Ear>,
}

/// The process itself: one that we started, or one that was forked for us.
enum Leader {
    Started(Child),
    Forked(Forked),
}

impl Leader {
    async fn wait(&mut self) -> io::Result<ExitStatus> {
        match self {
            Self::Started(child) => child.wait().await,
            Self::Forked(child) => child.wait().await,
        }
    }

    fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match self {
            Self::Started(child) => child.try_wait(),
            Self::Forked(child) => child.try_wait(),
        }
    }
}

impl Family {
    /// Has a process that was forked for us run the command, as [`Family::start`] would.
    ///
    /// # Errors
    /// Why it cannot; nothing of the command has been run.
    pub async fn begin(
        agent: WarmAgent,
        command: &Command,
        stdout: &Path,
        stderr: &Path,
        limit: u64,
    ) -> io::Result<Self> {
        let logs = (LimitedLog::create(stdout, limit)?, LimitedLog::create(stderr, limit)?);
        let (leader, stdout, stderr) = agent.begin(command).await?;
        let group = Pid::from_raw(leader.pid());
        let keepers = vec![tokio::spawn(keep(stdout, logs.0)), tokio::spawn(keep(stderr, logs.1))];
        Ok(Self { leader: Leader::Forked(leader), group, logs: keepers, inside: None })
    }

    /// Starts a process whose output goes to the two logs.
    ///
    /// # Errors
    /// Why it did not start, and whether trying again may help.
    pub fn start(command: &Command, stdout: &Path, stderr: &Path, limit: u64) -> Result<Self, NotStarted> {
        let program = command.argv.first().map(String::as_str).unwrap_or_default();
        let folder = command.cwd.display();
        if !command.cwd.is_dir() {
            let message = format!("cannot start {program:?}: its working directory {folder} does not exist");
            return Err(NotStarted { message, permanent: true });
        }
        let mut process = tokio::process::Command::new(program);
        process.args(command.argv.iter().skip(1)).env_remove(warm::VARIABLE).envs(&command.env);
        process.current_dir(&command.cwd).stdin(Stdio::null());
        Self::spawn(process, program, stdout, stderr, limit)
    }

    /// Starts `process`, called `name` where it does not start, whose output goes to the two logs.
    pub(super) fn spawn(
        mut process: tokio::process::Command,
        name: &str,
        stdout: &Path,
        stderr: &Path,
        limit: u64,
    ) -> Result<Self, NotStarted> {
        let logs = LimitedLog::create(stdout, limit)
            .and_then(|stdout| Ok((stdout, LimitedLog::create(stderr, limit)?)))
            .map_err(|error| {
                let message = format!("cannot write logs beside {}: {error}", stdout.display());
                NotStarted { message, permanent: false }
            })?;
        let mut child = process
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| not_started(name, &error))?;
        let mut keepers = Vec::new();
        if let Some(stream) = child.stdout.take() {
            keepers.push(tokio::spawn(keep(stream, logs.0)));
        }
        if let Some(stream) = child.stderr.take() {
            keepers.push(tokio::spawn(keep(stream, logs.1)));
        }
        let group = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
        Ok(Self { leader: Leader::Started(child), group: Pid::from_raw(group), logs: keepers, inside: None })
    }

    /// From now on the process itself is the agent that `inside` tells of.
    pub(super) fn enclose(&mut self, inside: Ear) {
        self.inside = Some(inside);
    }

    /// The number of the process, which is that of its group.
    pub fn pid(&self) -> i32 {
        self.group.as_raw()
    }

    /// Waits for the process itself; what it left behind may still run.
    pub async fn wait(&mut self) -> io::Result<()> {
        if let Some(inside) = &mut self.inside
            && inside.agent_ended().await
        {
            // Where nothing is left behind the rest ends at once.
            let _ = tokio::time::timeout(LOOK, self.leader.wait()).await;
            return Ok(());
        }
        self.leader.wait().await.map(drop)
    }

    /// Ends what still runs of the family: asks, waits up to `grace`, kills. Then closes the logs.
    ///
    /// # Errors
    /// Where something cannot be killed, or its output could not be kept: an evaluator would judge what is left of it.
    pub async fn end(mut self, grace: Duration) -> io::Result<Option<ExitStatus>> {
        let began = Instant::now();
        let mut asked = false;
        loop {
            // Until the process itself has been waited for, nothing else may be.
            let status = self.leader.try_wait()?;
            if status.is_some() {
                reap_orphans();
            }
            let alive = descendants(Pid::this().as_raw());
            if status.is_some() && alive.is_empty() {
                break;
            }
            if began.elapsed() >= grace.saturating_add(UNKILLABLE) {
                return Err(io::Error::other(format!("these processes cannot be killed: {alive:?}")));
            }
            if began.elapsed() >= grace {
                self.signal_all(&alive, Signal::SIGKILL);
            } else if !asked {
                self.signal_all(&alive, Signal::SIGTERM);
                asked = true;
            }
            tokio::time::sleep(LOOK).await;
        }
        let status = self.leader.try_wait()?;
        for log in self.logs {
            match tokio::time::timeout(LAST_OUTPUT, log).await {
                Ok(Ok(outcome)) => {
                    outcome.map_err(|error| io::Error::other(format!("cannot keep the output: {error}")))?
                }
                Ok(Err(error)) => return Err(io::Error::other(error)),
                Err(_) => return Err(io::Error::other("somebody who is none of its own keeps a log open")),
            }
        }
        if let Some(mut inside) = self.inside {
            // All that could say more is dead.
            let _ = tokio::time::timeout(LAST_OUTPUT, inside.agent_ended()).await;
            // That the stage ended well says nothing of the agent: whoever ended without a word was killed with it.
            let killed = ExitStatusExt::from_raw(Signal::SIGKILL as i32);
            let stage = status.filter(|status| !status.success()).unwrap_or(killed);
            return Ok(Some(inside.status().unwrap_or(stage)));
        }
        Ok(status)
    }

    /// The group, and also those who left it: they are still our descendants, for the supervisor adopts orphans. Each
    /// once, since many programs take a second SIGTERM for impatience.
    fn signal_all(&self, alive: &[i32], signal: Signal) {
        let alive = alive.iter().map(|pid| Pid::from_raw(*pid));
        let strays: Vec<Pid> = alive.filter(|pid| getpgid(Some(*pid)) != Ok(self.group)).collect();
        if self.group.as_raw() > 0 {
            let _ = killpg(self.group, signal);
        }
        for stray in strays {
            let _ = kill(stray, signal);
        }
    }
}

/// Takes the exit statuses of orphans that the supervisor has adopted. Only while it has no child of its own.
fn reap_orphans() {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}

/// Why a program does not start.
pub(super) fn not_started(program: &str, error: &io::Error) -> NotStarted {
    let (remedy, permanent) = match error.kind() {
        io::ErrorKind::NotFound => ("there is no such program; install it, or correct the first word of argv", true),
        io::ErrorKind::PermissionDenied => ("it may not be executed; check its permissions", true),
        io::ErrorKind::InvalidInput | io::ErrorKind::ArgumentListTooLong => {
            ("its arguments or environment cannot be passed on", true)
        }
        _ => ("the system refused", false),
    };
    NotStarted { message: format!("cannot start {program:?}: {remedy} ({error})"), permanent }
}
