//! Isolation of agents by Linux namespaces: no network but the gateway, nothing writable but their own folder, no processes
//! but theirs.
//!
//! Namespaces are made by a process of its own, the *stage*, which is this program again as `… isolate stage`: that takes a
//! single thread, and it keeps privileges that the supervisor shall not have. It starts `… isolate first`, the first process
//! of the new process namespace, which puts up the walls and starts the agent. The supervisor has to do with the stage as
//! with any agent: signals, time limit, logs and exit are handled in [`super::family`]. Whoever of the three is killed takes
//! the rest along. Where anything cannot be had, the agent is not started.
//!
//! * [`words`] — what the three say to each other.
//! * [`stage`] — makes the namespaces, opens the listeners inside.
//! * [`first`] — the first process inside: walls, agent, orphans.
//! * [`rooms`] — what the agent finds of the file system.
//! * [`privileges`] — what it may ask of the kernel.
//! * [`doors`] — the relay to the gateway, and the proxy that refuses everything. Served by the supervisor.
//! * [`limits`] — memory and number of processes. Set by the supervisor.

pub mod doors;
mod first;
mod limits;
mod privileges;
mod rooms;
mod stage;
mod words;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as Socket;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use tokio::net::UnixStream;

use self::doors::Doors;
use self::limits::Limits;
use self::rooms::Rooms;
pub(super) use self::words::Ear;
use self::words::{Inner, Outer, Word, passing};
use super::family::Family;
use super::record::{Command, End, NotStarted};
use crate::isolation::Enclosure;
use crate::work_dir::AttemptDir;

/// The two processes between supervisor and agent, as the program's arguments name them.
const STAGE: &str = "stage";
const FIRST: &str = "first";
/// In the stage jemalloc must not have its thread: a user namespace is only made by a process with a single one.
const ALLOCATOR: (&str, &str) = ("_RJEM_MALLOC_CONF", "background_thread:false");
/// How long the walls may take. They take milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the part of the isolation that `part` names. Call it before any async runtime or thread is started.
#[must_use]
pub fn main(part: &str) -> ExitCode {
    let outcome = match part {
        STAGE => stage::run(),
        FIRST => first::run(),
        _ => Err(io::Error::other(format!("there is no part {part:?} of the isolation"))),
    };
    if outcome.is_err() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// What the supervisor holds of an isolated agent beside its processes.
pub(super) struct Walls {
    doors: Doors,
    limits: Option<Limits>,
    /// What could not be had on this machine, for a person.
    pub(super) notes: Vec<String>,
}

impl Walls {
    /// Takes them down once the agent's family has ended, and adds to `end` what only they know.
    pub(super) async fn take_down(self, end: &mut End) {
        self.doors.close().await;
        if let Some(limits) = self.limits {
            end.out_of_memory = limits.out_of_memory();
            limits.remove().await;
        }
    }
}

/// Starts an agent behind its walls.
///
/// # Errors
/// Why it did not start, and whether trying again may help. It never starts without them.
pub(super) async fn start(
    agent: &Command,
    enclosure: &Enclosure,
    dir: &AttemptDir,
    log_limit: u64,
) -> Result<(Family, Walls), NotStarted> {
    let mut notes = Vec::new();
    let limits = match Limits::make(&enclosure.settings) {
        Ok(limits) => limits,
        Err(reason) if enclosure.settings.require_limits => {
            let message = format!("isolation.require_limits is set, and limits cannot be had here: {reason}");
            return Err(NotStarted { message, permanent: true });
        }
        Err(reason) => {
            notes.push(format!("isolation.memory_limit_bytes and isolation.pids_limit are not in force: {reason}"));
            None
        }
    };
    let system = |error: io::Error| passing(error.to_string());
    let (ours, theirs) = socket().map_err(system).map_err(described)?;
    let mut stage = tokio::process::Command::new("/proc/self/exe");
    stage.arg0("agl").args(["isolate", STAGE]).env(ALLOCATOR.0, ALLOCATOR.1).stdin(Stdio::from(OwnedFd::from(theirs)));
    let mut family = Family::spawn(stage, "the isolation's stage", &dir.stdout(), &dir.stderr(), log_limit)?;
    let walls = async {
        if let Some(limits) = &limits {
            limits.take_in(family.pid()).map_err(system)?;
        }
        let outer = Outer { nested_namespaces: enclosure.settings.nested_namespaces };
        let (mut ear, listeners) = Ear::at(ours, &outer).await?;
        let doors = Doors::open(listeners, enclosure).map_err(system)?;
        let mut inner = Some(Inner { rooms: Rooms::of(&enclosure.settings, dir), agent: agent.clone() });
        let mut notes = Vec::new();
        loop {
            match ear.hear().await {
                Some(Word::Lacks(note)) => notes.push(note),
                Some(Word::Ready) => {
                    if let Some(inner) = inner.take() {
                        ear.say(&inner).await.map_err(system)?;
                    }
                }
                Some(Word::Started { notes: more }) => {
                    notes.extend(more);
                    return Ok((ear, doors, notes));
                }
                Some(Word::Failed(reason)) => return Err(reason),
                Some(Word::Ended { .. }) | None => {
                    return Err(passing("its isolation broke down before it was started".to_owned()));
                }
            }
        }
    };
    match tokio::time::timeout(PATIENCE, walls).await {
        Ok(Ok((ear, doors, more))) => {
            family.enclose(ear);
            notes.extend(more);
            Ok((family, Walls { doors, limits, notes }))
        }
        failed => {
            let _ = family.end(Duration::ZERO).await;
            Err(match failed {
                Ok(Err(reason)) => described(reason),
                _ => passing(format!("cannot isolate the agent: not done after {} seconds", PATIENCE.as_secs())),
            })
        }
    }
}

fn socket() -> io::Result<(UnixStream, Socket)> {
    let (ours, theirs) = Socket::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, theirs))
}

/// Says that it is the isolation that failed, where the agent's own start is not what failed.
fn described(reason: NotStarted) -> NotStarted {
    if reason.message.starts_with("cannot start") {
        return reason;
    }
    NotStarted { message: format!("cannot isolate the agent: {}", reason.message), ..reason }
}
