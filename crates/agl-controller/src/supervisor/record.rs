//! What the controller tells a supervisor, and what it hears and finds from it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::isolation::Enclosure;

/// All that a supervisor needs. It comes on its standard input, one line, so that no key lies on disk or in a command line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// The agent.
    pub agent: Command,
    /// Runs after it.
    pub evaluator: Option<Command>,
    /// What both find under `AGL_INPUT`.
    pub input: Value,
    /// How much is kept of each output stream.
    pub log_limit_bytes: u64,
    /// Between SIGTERM and SIGKILL.
    pub kill_grace_seconds: f64,
    /// The walls around the agent; the evaluator runs outside.
    #[serde(default)]
    pub isolation: Option<Enclosure>,
}

/// A process to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// The program and its arguments; not empty.
    pub argv: Vec<String>,
    /// Added to the controller's environment.
    pub env: BTreeMap<String, String>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// Wall-clock limit; 0 is none.
    pub timeout_seconds: u64,
}

/// What a supervisor says on its standard output, one line each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The agent runs.
    Started {
        /// Its process, which leads its group.
        pid: i32,
    },
    /// The agent and all that it left behind are gone. The evaluator waits for an [`Answer`].
    AgentEnded {
        /// How it ended.
        end: End,
    },
    /// Something that this machine does not have, and that is no reason to give up.
    Note {
        /// What, for a person.
        message: String,
    },
    /// The supervisor gives up; there will be no exit record.
    Failed {
        /// Why, for a person.
        message: String,
    },
}

/// What the controller says about the evaluator. A controller that is gone, or says nothing for a while, means [`Answer::Go`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Run it.
    Go,
    /// Do not: the attempt is repeated anyway.
    Skip,
}

/// How a process ended. `exit.json` and `agent_end.json` hold it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Its exit code, if it exited.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// It ran into its time limit and was killed.
    pub timed_out: bool,
    /// The controller asked for its end.
    pub stopped: bool,
    /// It never started.
    pub not_started: Option<NotStarted>,
    /// What else there is to say about its end, such as that it ran out of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The kernel killed one of its processes because its memory limit was reached.
    #[serde(default)]
    pub out_of_memory: bool,
    /// How long it ran.
    pub seconds: f64,
}

impl End {
    /// The exit code as the attempt keeps it: negative is the signal.
    #[must_use]
    pub fn exit_code(&self) -> Option<i32> {
        self.code.or(self.signal.map(|signal| -signal))
    }
}

/// Why a process never started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotStarted {
    /// For a person.
    pub message: String,
    /// Trying again will not help: there is no such program or folder, or it may not be run.
    pub permanent: bool,
}

/// The outcome of an attempt's processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// The agent.
    pub agent: End,
    /// The evaluator, if it was run.
    pub evaluator: Option<End>,
}
