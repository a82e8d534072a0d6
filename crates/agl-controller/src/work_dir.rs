//! Where everything lies on disk.
//!
//! ```text
//! WORK_DIR/
//!   controller.lock                  held while a controller runs
//!   controller_id                    who the attempts belong to, across restarts
//!   relay/  relay.json               what containers without network reach the gateway by
//!   running/ROLLOUT@ATTEMPT          one file for every attempt that may have a supervisor
//!   rollouts/ROLLOUT/ATTEMPT/
//!     work/                          the agent's working folder
//!     input.json                     AGL_INPUT of the agent
//!     stdout.log  stderr.log         head and tail of what the agent wrote
//!     evaluator.input.json  evaluator.stdout.log  evaluator.stderr.log
//!     supervisor.json  agent.json    who runs: number and start time
//!     agent_end.json  exit.json      how it ended
//!     supervisor.log                 what the supervisor had to complain about
//!     evaluation/                    the same for an evaluator alone, whose agent ran in a cluster or a container
//!     abandoned                      the controller has given this attempt up; the supervisor must not start it
//! ```

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ControllerError;

/// A work directory that this controller alone uses. Held as long as the controller runs.
#[derive(Debug)]
pub struct WorkDir {
    root: PathBuf,
    controller_id: String,
    /// The lock ends with the file. `None`: we only look.
    _lock: Option<File>,
}

impl WorkDir {
    /// Creates the directory if need be, and locks it.
    ///
    /// # Errors
    /// [`ControllerError::WorkDir`], or [`ControllerError::WorkDirInUse`] where another controller has it.
    pub fn open(root: &Path) -> Result<Self, ControllerError> {
        let fault = |path: &Path| {
            let path = path.to_owned();
            move |source| ControllerError::WorkDir { path, source }
        };
        std::fs::create_dir_all(root).map_err(fault(root))?;
        let root = root.canonicalize().map_err(fault(root))?;
        let running = root.join("running");
        std::fs::create_dir_all(&running).map_err(fault(&running))?;
        let lock_path = root.join("controller.lock");
        let lock = File::create(&lock_path).map_err(fault(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(ControllerError::WorkDirInUse { path: root }),
            Err(std::fs::TryLockError::Error(source)) => return Err(fault(&lock_path)(source)),
        }
        let id_path = root.join("controller_id");
        let controller_id = match std::fs::read_to_string(&id_path) {
            Ok(id) if !id.trim().is_empty() => id.trim().to_owned(),
            _ => {
                let id = uuid::Uuid::new_v4().simple().to_string();
                write_atomically(&id_path, id.as_bytes()).map_err(fault(&id_path))?;
                id
            }
        };
        Ok(Self { root, controller_id, _lock: Some(lock) })
    }

    /// A work directory that is only looked at; whoever uses it goes on, and one that does not exist is empty.
    #[must_use]
    pub fn look(root: &Path) -> Self {
        let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
        let id = std::fs::read_to_string(root.join("controller_id")).unwrap_or_default();
        Self { root, controller_id: id.trim().to_owned(), _lock: None }
    }

    /// Who the attempts in this directory belong to.
    #[must_use]
    pub fn controller_id(&self) -> &str {
        &self.controller_id
    }

    /// The directory itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of an attempt, whether it exists or not.
    #[must_use]
    pub fn attempt(&self, rollout_id: &str, attempt_id: &str) -> AttemptDir {
        AttemptDir::new(self.root.join("rollouts").join(folder_name(rollout_id)).join(folder_name(attempt_id)))
    }
}

impl WorkDir {
    /// Deletes the folders of rollouts that were last written to before `before` and are not among those to keep; gives how
    /// many. What cannot be deleted now is tried again the next time.
    pub(crate) fn prune(&self, keep: &HashSet<String>, before: SystemTime) -> usize {
        let keep: HashSet<String> = keep.iter().map(|id| folder_name(id)).collect();
        let Ok(rollouts) = std::fs::read_dir(self.root.join("rollouts")) else { return 0 };
        let old = rollouts.flatten().filter(|entry| {
            !keep.contains(&*entry.file_name().to_string_lossy()) && last_written(&entry.path()) < Some(before)
        });
        old.filter(|entry| std::fs::remove_dir_all(entry.path()).is_ok()).count()
    }

    fn mark_path(&self, rollout_id: &str, attempt_id: &str) -> PathBuf {
        self.root.join("running").join(format!("{}@{}", folder_name(rollout_id), folder_name(attempt_id)))
    }

    /// Notes that an attempt is about to get a supervisor.
    pub(crate) fn mark(&self, rollout_id: &str, attempt_id: &str) -> std::io::Result<()> {
        write_record(&self.mark_path(rollout_id, attempt_id), &(rollout_id, attempt_id))
    }

    /// Notes that an attempt's supervisor has ended and been reported.
    pub(crate) fn unmark(&self, rollout_id: &str, attempt_id: &str) {
        let _ = std::fs::remove_file(self.mark_path(rollout_id, attempt_id));
    }

    /// Attempts that may have a supervisor: `(rollout_id, attempt_id)`.
    pub(crate) fn marked(&self) -> Vec<(String, String)> {
        let Ok(entries) = std::fs::read_dir(self.root.join("running")) else { return Vec::new() };
        entries.flatten().filter_map(|entry| read_record(&entry.path())).collect()
    }
}

/// The folder of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptDir {
    path: PathBuf,
}

impl AttemptDir {
    /// The folder at `path`; an attempt's `runner.dir` names it.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The agent's working folder.
    #[must_use]
    pub fn work(&self) -> PathBuf {
        self.path.join("work")
    }

    /// What the agent finds under `AGL_INPUT`.
    #[must_use]
    pub fn input(&self) -> PathBuf {
        self.path.join("input.json")
    }

    /// What the agent wrote to its standard output.
    #[must_use]
    pub fn stdout(&self) -> PathBuf {
        self.path.join("stdout.log")
    }

    /// What the agent wrote to its standard error.
    #[must_use]
    pub fn stderr(&self) -> PathBuf {
        self.path.join("stderr.log")
    }

    /// What the evaluator finds under `AGL_INPUT`; written after the agent has ended.
    #[must_use]
    pub fn evaluator_input(&self) -> PathBuf {
        self.path.join("evaluator.input.json")
    }

    /// What the evaluator wrote to its standard output.
    #[must_use]
    pub fn evaluator_stdout(&self) -> PathBuf {
        self.path.join("evaluator.stdout.log")
    }

    /// What the evaluator wrote to its standard error.
    #[must_use]
    pub fn evaluator_stderr(&self) -> PathBuf {
        self.path.join("evaluator.stderr.log")
    }

    /// The folder of the supervisor of an evaluator whose agent ran elsewhere, in a container or a cluster.
    #[must_use]
    pub fn evaluation(&self) -> Self {
        Self::new(self.path.join("evaluation"))
    }

    pub(crate) fn supervisor(&self) -> PathBuf {
        self.path.join("supervisor.json")
    }

    pub(crate) fn supervisor_log(&self) -> PathBuf {
        self.path.join("supervisor.log")
    }

    pub(crate) fn agent(&self) -> PathBuf {
        self.path.join("agent.json")
    }

    pub(crate) fn agent_end(&self) -> PathBuf {
        self.path.join("agent_end.json")
    }

    pub(crate) fn exit(&self) -> PathBuf {
        self.path.join("exit.json")
    }

    pub(crate) fn abandoned(&self) -> PathBuf {
        self.path.join("abandoned")
    }

    /// Marks an agent in a container that was stopped on our behalf.
    pub(crate) fn stopped(&self) -> PathBuf {
        self.path.join("stopped")
    }

    /// Takes back that the attempt was given up, for one that begins only now.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn begin_anew(&self) -> std::io::Result<()> {
        match std::fs::remove_file(self.abandoned()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the folder and the agent's working folder in it.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn create(&self) -> std::io::Result<()> {
        std::fs::create_dir_all(self.work())
    }
}

/// When anything directly in the attempts of a rollout's folder was last written. `None` where that cannot be told.
fn last_written(rollout: &Path) -> Option<SystemTime> {
    let attempts = std::fs::read_dir(rollout).ok()?.flatten();
    let written = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    let files = attempts.flat_map(|attempt| std::fs::read_dir(attempt.path()).into_iter().flatten().flatten());
    files.filter_map(|file| written(&file.path())).max().or_else(|| written(rollout))
}

/// Writes a record so that a reader sees all of it or nothing, also after a crash.
///
/// # Errors
/// What the file system says.
pub(crate) fn write_record(path: &Path, record: &impl Serialize) -> std::io::Result<()> {
    write_atomically(path, &serde_json::to_vec(record)?)
}

/// Reads a record; `None` where there is none that is whole.
pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    std::fs::rename(&new, path)
}

/// Escapes everything but letters, digits, `-`, `_`, `~` and `.`, as in a URL.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_~.".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// An id as the name of a folder: never `.` or `..`, no slash, and short enough for a file system.
fn folder_name(id: &str) -> String {
    let mut name = escape(id);
    if name.is_empty() || name.starts_with('.') {
        name.insert(0, '%');
    }
    if name.len() > 200 {
        // Long ids are told apart by a hash of the whole.
        name = format!("{}%{:032x}", &name[..160], fnv_1a_128(id.as_bytes()));
    }
    name
}

fn fnv_1a_128(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash: u128, byte| {
        (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013B)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_stay_inside_their_folder_and_apart_from_each_other() {
        assert_eq!(folder_name("r-1_a.b"), "r-1_a.b");
        assert_eq!(folder_name("../../etc"), "%..%2F..%2Fetc");
        assert_eq!(folder_name(".."), "%..");
        assert_eq!(folder_name(""), "%");
        assert_eq!(folder_name("a/b"), "a%2Fb");
        let long = |last: &str| folder_name(&("x".repeat(300) + last));
        assert_ne!(long("1"), long("2"));
        assert!(long("1").len() <= 200);
    }

    #[test]
    fn only_old_folders_of_rollouts_that_have_ended_are_pruned() {
        let folder = tempfile::tempdir().unwrap();
        let work_dir = WorkDir::open(folder.path()).unwrap();
        for id in ["old", "runs", "a/b"] {
            work_dir.attempt(id, "0").create().unwrap();
        }
        let keep = HashSet::from(["runs".to_owned(), "a/b".to_owned()]);
        assert_eq!(work_dir.prune(&keep, SystemTime::now() - std::time::Duration::from_secs(60)), 0);
        assert_eq!(work_dir.prune(&keep, SystemTime::now() + std::time::Duration::from_secs(60)), 1);
        let there = |id: &str| work_dir.attempt(id, "0").path().exists();
        assert_eq!((there("old"), there("runs"), there("a/b")), (false, true, true));
    }

    #[test]
    fn a_work_directory_serves_one_controller_and_keeps_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let first = WorkDir::open(folder.path()).unwrap();
        let id = first.controller_id().to_owned();
        let message = WorkDir::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains("another controller is using"), "{message}");
        drop(first);
        assert_eq!(WorkDir::open(folder.path()).unwrap().controller_id(), id);
    }
}
