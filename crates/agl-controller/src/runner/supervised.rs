//! The controller's end of a supervisor: one that it started, or one that an earlier controller left.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::pipe;
use tokio::process::Child;

use super::Leave;
use crate::process_id::ProcessId;
use crate::supervisor::record::{Answer, Event, ExitRecord, Spec};
use crate::work_dir::{AttemptDir, read_record};
use crate::zygote::Zygote;

/// How often the records of a supervisor are looked at that is not our child.
const LOOK: Duration = Duration::from_millis(200);
/// The same for the end of one that has closed its pipes.
const LAST_LOOK: Duration = Duration::from_millis(5);
/// How much of a log goes into an error message.
const TAIL: u64 = 600;

/// A supervisor and what it has said so far. Dropped while the supervisor runs, it asks it to end the agent, unless `leave`
/// is set by then.
#[derive(Debug)]
pub struct Supervised {
    dir: AttemptDir,
    process: Option<ProcessId>,
    link: Option<Link>,
    /// Why it gave up, if it said so.
    complaint: Option<String>,
    agent_end_seen: bool,
    /// The agent is to go on when this is dropped.
    leave: Leave,
}

/// The pipes to a supervisor that we started.
#[derive(Debug)]
struct Link {
    /// `None` where the zygote forked it.
    child: Option<Child>,
    lines: Lines<BufReader<pipe::Receiver>>,
    stdin: pipe::Sender,
}

impl Supervised {
    /// Starts a supervisor and tells it what to run; warm where there is a zygote and the agent is for it.
    ///
    /// # Errors
    /// Why the supervisor itself could not be started.
    pub async fn start(
        program: Option<&Path>,
        dir: &AttemptDir,
        spec: &Spec,
        leave: Leave,
        zygote: Option<&Zygote>,
    ) -> io::Result<Self> {
        dir.create()?;
        let supervised = |process, link| {
            let (dir, leave) = (dir.clone(), leave.clone());
            Self { dir, process, link: Some(link), complaint: None, agent_end_seen: false, leave }
        };
        if let Some(zygote) = zygote
            && let Some(forked) = zygote.supervisor(program, dir, &spec.agent).await
        {
            let link = Link { child: None, lines: BufReader::new(forked.stdout).lines(), stdin: forked.stdin };
            let mut warm = supervised(ProcessId::of(forked.pid), link);
            match warm.say(spec).await {
                Ok(()) => return Ok(warm),
                // Nobody holds the other end any more: it has ended, and without orders it did nothing.
                Err(error) => tracing::warn!(dir = %dir.path().display(), %error, "a warm start failed, starting cold"),
            }
        }
        // The running program itself, even where its file has been replaced since: both ends speak the same version.
        let mut command = tokio::process::Command::new(program.unwrap_or(Path::new("/proc/self/exe")));
        command.arg0("agl").arg("supervise").arg(dir.path());
        // Settings and keys of the controller are none of the agent's business.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("AGL_") {
                command.env_remove(name);
            }
        }
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(dir.supervisor_log())?).spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("the supervisor has no pipes"));
        };
        let stdin = pipe::Sender::from_owned_fd(stdin.into_owned_fd()?)?;
        let stdout = pipe::Receiver::from_owned_fd(stdout.into_owned_fd()?)?;
        let process = child.id().and_then(|pid| ProcessId::of(i32::try_from(pid).ok()?));
        let mut cold = supervised(process, Link { child: Some(child), lines: BufReader::new(stdout).lines(), stdin });
        cold.say(spec).await?;
        Ok(cold)
    }

    /// Takes up the supervisor of an attempt that an earlier controller started, or only its record where it has ended.
    /// `None` where there is neither: the attempt is then marked, so that a supervisor that is only just starting does
    /// not begin, and what its agent may have left is killed.
    #[must_use]
    pub fn find(dir: &AttemptDir, leave: Leave) -> Option<Self> {
        let found = |process| {
            let leave = leave.clone();
            Some(Self { dir: dir.clone(), process, link: None, complaint: None, agent_end_seen: false, leave })
        };
        let alive = || read_record::<ProcessId>(&dir.supervisor()).filter(ProcessId::is_alive);
        if let Some(process) = alive() {
            return found(Some(process));
        }
        if !dir.exit().exists() && dir.path().exists() {
            // The supervisor writes its name before it looks for this mark.
            let _ = File::create(dir.abandoned());
            if let Some(process) = alive() {
                return found(Some(process));
            }
        }
        if dir.exit().exists() {
            return found(None);
        }
        kill_left_behind(dir);
        None
    }

    /// True where this controller started the supervisor.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.link.is_some()
    }

    /// Makes the supervisor and its agent go on when this is dropped.
    pub fn let_go(&mut self) {
        self.leave = Leave::always();
    }

    /// The supervisor's process number.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.process.map(|process| process.pid)
    }

    /// Waits for what the supervisor says next; `None` once it has ended, see [`Supervised::record`]. May be dropped and
    /// called again.
    pub async fn next(&mut self) -> Option<Event> {
        match self.link {
            Some(_) => self.next_said().await,
            None => self.next_found().await,
        }
    }

    async fn next_said(&mut self) -> Option<Event> {
        let link = self.link.as_mut()?;
        while let Ok(Some(line)) = link.lines.next_line().await {
            match serde_json::from_str(&line) {
                Ok(Event::Note { message }) => note_once(message),
                Ok(Event::Failed { message }) => self.complaint = Some(message),
                Ok(event) => return Some(event),
                Err(error) => {
                    tracing::warn!(dir = %self.dir.path().display(), %line, %error, "a supervisor said what we do not know")
                }
            }
        }
        match &mut link.child {
            Some(child) => {
                if let Err(error) = child.wait().await {
                    tracing::warn!(dir = %self.dir.path().display(), %error, "cannot wait for a supervisor");
                }
            }
            None => {
                while self.process.is_some_and(|process| process.is_alive()) {
                    tokio::time::sleep(LAST_LOOK).await;
                }
            }
        }
        None
    }

    async fn next_found(&mut self) -> Option<Event> {
        loop {
            let alive = self.process.is_some_and(|process| process.is_alive());
            if !self.agent_end_seen
                && let Some(end) = read_record(&self.dir.agent_end())
            {
                self.agent_end_seen = true;
                return Some(Event::AgentEnded { end });
            }
            if !alive {
                return None;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Answers [`Event::AgentEnded`]. A supervisor that does not hear us decides for itself.
    pub async fn answer(&mut self, answer: Answer) {
        if let Err(error) = self.say(&answer).await {
            tracing::debug!(dir = %self.dir.path().display(), %error, "a supervisor did not hear our answer");
        }
    }

    async fn say(&mut self, words: &impl serde::Serialize) -> io::Result<()> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let mut line = serde_json::to_vec(words)?;
        line.push(b'\n');
        link.stdin.write_all(&line).await
    }

    /// Asks the supervisor to end the agent.
    pub fn terminate(&self) {
        if let Some(process) = self.process {
            process.signal(Signal::SIGTERM);
        }
    }

    /// Ends a supervisor that does not end by itself, and its agent.
    pub fn kill(&self) {
        if let Some(process) = self.process {
            process.signal(Signal::SIGKILL);
        }
        kill_left_behind(&self.dir);
    }

    /// What the supervisor left, once it has ended; or why there is nothing.
    ///
    /// # Errors
    /// A message for a person.
    pub fn record(&self) -> Result<ExitRecord, String> {
        if let Some(record) = read_record(&self.dir.exit()) {
            return Ok(record);
        }
        kill_left_behind(&self.dir);
        let reason = self.complaint.clone().unwrap_or_else(|| {
            let log = tail(&self.dir.supervisor_log());
            if log.is_empty() { "it was killed".to_owned() } else { log }
        });
        Err(format!("its supervisor ended without a record in {}: {reason}", self.dir.path().display()))
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        if !self.leave.is_set() {
            self.terminate();
        }
    }
}

/// What a machine does not have it does not have for any attempt: each such thing is said once.
fn note_once(message: String) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.contains(&message) {
        tracing::warn!("{message}");
        said.insert(message);
    }
}

fn kill_left_behind(dir: &AttemptDir) {
    if let Some(agent) = read_record::<ProcessId>(&dir.agent()) {
        agent.signal_group(Signal::SIGKILL);
    }
}

/// The last lines of a log, for a message; empty where there are none.
#[must_use]
pub fn tail(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
        let mut bytes = Vec::new();
        file.take(TAIL).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read().map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()).unwrap_or_default()
}
