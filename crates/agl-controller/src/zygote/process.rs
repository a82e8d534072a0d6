//! The zygote as a process, and what is said with it.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram as StdSocket;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, socketpair};
use tokio::io::{AsyncBufReadExt, BufReader, Interest};
use tokio::net::UnixDatagram;
use tokio::net::unix::pipe;
use tokio::process::Child;
use tokio::time::timeout;

use crate::config::ZygoteConfig;

const SOURCE: &str = include_str!("zygote.py");
/// Runs the source, which comes as the first packet, in a namespace of its own: `__main__` is for the agents.
const BOOT: &str =
    r#"exec(compile(__import__("os").read(0, 1 << 20), "<agl zygote>", "exec"), {"__name__": "agl zygote"})"#;
/// How long a zygote that has nothing else to do may take for a fork.
const FORK_PATIENCE: Duration = Duration::from_secs(10);
/// How much of its output goes into a message.
const LAST_WORDS: usize = 600;

/// A supervisor that is to be forked: its command line and its descriptors.
pub struct Birth {
    /// `program NUL argv[0] NUL argv[1] …`; an empty program stands for [`Birth::own`].
    pub command: Vec<u8>,
    /// Its standard input, output and error.
    pub streams: [OwnedFd; 3],
    /// The running program itself, where that is the supervisor.
    pub own: Option<File>,
}

/// A running zygote. It ends when this is dropped, and with the controller.
pub struct Process {
    child: Child,
    socket: UnixDatagram,
}

impl Process {
    /// Starts a zygote and waits for its imports.
    ///
    /// # Errors
    /// Why it cannot be used; trying again would not help.
    pub async fn start(config: &ZygoteConfig, python: &str) -> Result<Self, String> {
        let last_words = Arc::default();
        let mut process =
            Self::spawn(python, &last_words).map_err(|error| format!("cannot start {python:?}: {error}"))?;
        let ready = timeout(Duration::from_secs_f64(config.ready_seconds), process.import(config)).await;
        match ready {
            Ok(Ok(answer)) if answer == "ready" => Ok(process),
            Ok(Ok(problem)) if !problem.is_empty() => Err(problem),
            Ok(outcome) => {
                let status = process.child.wait().await.map(|status| status.to_string());
                let how = outcome.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
                let said = last_words.lock().unwrap_or_else(PoisonError::into_inner).clone();
                Err(format!("it ended while it imported ({}): {said}", status.unwrap_or_else(|_| how.to_string())))
            }
            Err(_) => Err(format!("its imports take longer than zygote.ready_seconds = {}", config.ready_seconds)),
        }
    }

    fn spawn(python: &str, last_words: &Arc<Mutex<String>>) -> io::Result<Self> {
        // Packets, so that a message and its descriptors come together; connected, so that the end of one is told to the other.
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(io::Error::from)?;
        let ours = StdSocket::from(ours);
        ours.set_nonblocking(true)?;
        // Pipes, as agents have them: their output streams are made when the zygote starts.
        let (output, writer) = io::pipe()?;
        let mut command = tokio::process::Command::new(python);
        command.args(["-c", BOOT, "agl-zygote"]).process_group(0).kill_on_drop(true);
        for (name, _) in std::env::vars_os() {
            if name.as_bytes().starts_with(b"AGL_") {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::from(theirs)).stdout(writer.try_clone()?).stderr(writer);
        let child = command.spawn()?;
        tokio::spawn(listen(pipe::Receiver::from_owned_fd(output.into())?, last_words.clone()));
        Ok(Self { child, socket: UnixDatagram::from_std(ours)? })
    }

    /// The zygote's answer: `ready`, or why not.
    async fn import(&self, config: &ZygoteConfig) -> io::Result<String> {
        let folders = config.path.iter().map(|folder| folder.as_os_str().as_bytes());
        let mut words = config.imports.len().to_string().into_bytes();
        for word in config.imports.iter().map(String::as_bytes).chain(folders) {
            words.push(0);
            words.extend(word);
        }
        self.socket.send(SOURCE.as_bytes()).await?;
        self.socket.send(&words).await?;
        self.hear().await
    }

    async fn hear(&self) -> io::Result<String> {
        let mut answer = vec![0; 64 * 1024];
        let length = self.socket.recv(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    }

    /// Forks a supervisor and returns its process number.
    ///
    /// # Errors
    /// Why not; the zygote is then not to be used any more.
    pub async fn fork(&self, birth: &Birth) -> Result<i32, String> {
        let conversation = async {
            let descriptors: Vec<_> = birth
                .streams
                .iter()
                .map(AsRawFd::as_raw_fd)
                .chain(birth.own.as_ref().map(AsRawFd::as_raw_fd))
                .collect();
            let send = || {
                let message = [ControlMessage::ScmRights(&descriptors)];
                let socket = self.socket.as_raw_fd();
                Ok(sendmsg::<UnixAddr>(socket, &[IoSlice::new(&birth.command)], &message, MsgFlags::empty(), None)?)
            };
            self.socket.async_io(Interest::WRITABLE, send).await?;
            self.hear().await
        };
        match timeout(FORK_PATIENCE, conversation).await {
            Ok(Ok(answer)) => {
                answer.parse().map_err(|_| if answer.is_empty() { "it ended".to_owned() } else { answer })
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("it did not answer for {} s", FORK_PATIENCE.as_secs())),
        }
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }
}

/// Logs what the imports print, and keeps the end of it.
async fn listen(output: pipe::Receiver, last_words: Arc<Mutex<String>>) {
    let mut lines = BufReader::new(output).split(b'\n');
    while let Ok(Some(line)) = lines.next_segment().await {
        let line = String::from_utf8_lossy(&line);
        tracing::info!("zygote: {line}");
        let mut kept = last_words.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_str(&line);
        kept.push('\n');
        let beyond = kept.len().saturating_sub(LAST_WORDS);
        if let Some(beginning) = (beyond..kept.len()).find(|index| kept.is_char_boundary(*index)) {
            kept.drain(..beginning);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn problem(imports: &[&str], module: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("questionable.py"), module).unwrap();
        let config = ZygoteConfig {
            imports: imports.iter().map(|name| (*name).to_owned()).collect(),
            path: vec![folder.path().to_owned()],
            python: None,
            ready_seconds: 20.0,
        };
        Process::start(&config, "python3").await.err().unwrap()
    }

    #[tokio::test]
    async fn what_is_wrong_with_an_import_is_said_with_its_name() {
        let threads = "import threading, time\n\
            threading.Thread(target=time.sleep, args=(60,), daemon=True, name='ticker').start()\n";
        let message = problem(&["json", "questionable"], threads).await;
        assert!(message.contains("the import of questionable started 1 threads (ticker)"), "{message}");
        let message = problem(&["no_such_module"], "").await;
        assert!(message.contains("the import of no_such_module failed: ModuleNotFoundError"), "{message}");
        let message = problem(&["questionable"], "print('last words')\nimport os\nos._exit(3)").await;
        assert!(message.contains("it ended while it imported") && message.contains("3"), "{message}");
    }
}
