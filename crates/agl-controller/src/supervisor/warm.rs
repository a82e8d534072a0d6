//! An agent that a zygote forked for us: our child, which waits for its command.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal as Kill, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use super::record::Command;
use crate::zygote::command::Invocation;

/// Names the agent's process. Never seen by agents.
pub const VARIABLE: &str = "AGL_WARM_AGENT";
/// Where we find our ends of the agent's pipes; the same numbers are in `zygote.py`.
const COMMAND: i32 = 3;
const STDOUT: i32 = 4;
const STDERR: i32 = 5;
const READY: i32 = 6;
/// How long an agent may take to make itself ready. It only has to set what its command says.
const PATIENCE: Duration = Duration::from_secs(10);

/// A child that we did not start. As long as we have not waited for it, its number is its own.
pub struct Forked {
    pid: Pid,
    /// Told at the end of any child.
    ends: Signal,
    status: Option<ExitStatus>,
}

/// An agent before its first line.
pub struct WarmAgent {
    process: Forked,
    command: pipe::Sender,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
    ready: pipe::Receiver,
}

impl WarmAgent {
    /// The agent that was forked with us, if one was. To be called once.
    ///
    /// # Errors
    /// Why there is one that cannot be used; it has been killed.
    pub fn inherited() -> io::Result<Option<Self>> {
        let Some(pid) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let pid = pid.to_str().and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 1);
        let Some(pid) = pid.map(Pid::from_raw) else {
            return Err(io::Error::other(format!("{VARIABLE} names no process")));
        };
        let agent = Self::at_our_pipes(pid);
        for number in [COMMAND, STDOUT, STDERR, READY] {
            nix::unistd::close(number)?;
        }
        agent.map(Some).inspect_err(|_| {
            let _ = kill(pid, Kill::SIGKILL);
        })
    }

    /// A number that we were given cannot be taken over safely; but what stands behind it can be opened once more.
    fn at_our_pipes(pid: Pid) -> io::Result<Self> {
        let receiver = |number| pipe::OpenOptions::new().open_receiver(format!("/proc/self/fd/{number}"));
        Ok(Self {
            process: Forked { pid, ends: signal(SignalKind::child())?, status: None },
            command: pipe::OpenOptions::new().open_sender(format!("/proc/self/fd/{COMMAND}"))?,
            stdout: receiver(STDOUT)?,
            stderr: receiver(STDERR)?,
            ready: receiver(READY)?,
        })
    }

    /// Tells the agent what to do, and waits until it is about to do it. Gives its standard output and error too.
    ///
    /// # Errors
    /// Why it will not; it has then been killed, before the first line of its command.
    pub async fn begin(self, command: &Command) -> io::Result<(Forked, pipe::Receiver, pipe::Receiver)> {
        let Self { process, command: mut to, stdout, stderr, mut ready } = self;
        let pid = process.pid;
        let conversation = async move {
            to.write_all(&message(command, std::env::vars_os().collect())?).await?;
            // The end of the pipe is the end of the command.
            drop(to);
            ready.read_u8().await
        };
        let begun = timeout(PATIENCE, conversation).await.unwrap_or_else(|late| Err(late.into()));
        begun.map(|_| (process, stdout, stderr)).map_err(|error| {
            let _ = kill(pid, Kill::SIGKILL);
            io::Error::other(format!("the forked agent did not begin: {error}"))
        })
    }
}

/// The number of fields, then each behind a zero byte, which none of them can hold.
fn message(command: &Command, mut env: BTreeMap<OsString, OsString>) -> io::Result<Vec<u8>> {
    env.remove(OsStr::new(VARIABLE));
    env.extend(command.env.iter().map(|(name, value)| (name.into(), value.into())));
    let invocation = Invocation::of(&command.argv).map_err(io::Error::other)?;
    let asked_by_environment = env.get(OsStr::new("PYTHONUNBUFFERED")).is_some_and(|value| !value.is_empty());
    let unbuffered = invocation.unbuffered || asked_by_environment;
    let mut fields: Vec<Cow<'_, [u8]>> = vec![
        invocation.kind.as_str().as_bytes().into(),
        if unbuffered { &b"unbuffered"[..] } else { b"" }.into(),
        command.cwd.as_os_str().as_bytes().into(),
    ];
    for list in [&command.argv[..], invocation.words] {
        fields.push(list.len().to_string().into_bytes().into());
        fields.extend(list.iter().map(|word| word.as_bytes().into()));
    }
    for (name, value) in &env {
        fields.push([name.as_bytes(), value.as_bytes()].join(&b'=').into());
    }
    let mut message = fields.len().to_string().into_bytes();
    for field in fields {
        if field.contains(&0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        message.push(0);
        message.extend_from_slice(&field);
    }
    Ok(message)
}

impl Forked {
    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Waits for its end. May be dropped and called again.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if self.ends.recv().await.is_none() {
                return Err(io::Error::other("nobody tells of the end of children any more"));
            }
        }
    }

    /// How it ended, if it has.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = match waitpid(self.pid, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(_, code)) => Some(ExitStatus::from_raw(code << 8)),
                Ok(WaitStatus::Signaled(_, signal, dumped)) => {
                    Some(ExitStatus::from_raw(signal as i32 | if dumped { 0x80 } else { 0 }))
                }
                Ok(_) | Err(Errno::EINTR) => None,
                Err(error) => return Err(error.into()),
            };
        }
        Ok(self.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(message: &[u8]) -> Vec<&str> {
        message.split(|byte| *byte == 0).map(|field| std::str::from_utf8(field).unwrap()).collect()
    }

    #[test]
    fn a_command_is_said_whole_and_its_environment_lies_over_ours() {
        let command = Command {
            argv: ["python3", "-u", "run.py", ""].map(str::to_owned).to_vec(),
            env: BTreeMap::from([("B".to_owned(), "its".to_owned())]),
            cwd: "/srv".into(),
            timeout_seconds: 0,
        };
        let own = [("A", "a=b"), ("B", "ours"), (VARIABLE, "17")].map(|(name, value)| (name.into(), value.into()));
        let message = message(&command, BTreeMap::from(own)).unwrap();
        let expected = [
            "13",
            "script",
            "unbuffered",
            "/srv",
            "4",
            "python3",
            "-u",
            "run.py",
            "",
            "2",
            "run.py",
            "",
            "A=a=b",
            "B=its",
        ];
        assert_eq!(fields(&message), expected);
    }

    #[test]
    fn a_zero_byte_is_refused_as_a_cold_start_refuses_it() {
        let command = Command {
            argv: ["python3", "-c", "a\0b"].map(str::to_owned).to_vec(),
            env: BTreeMap::new(),
            cwd: "/".into(),
            timeout_seconds: 0,
        };
        assert_eq!(message(&command, BTreeMap::new()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
