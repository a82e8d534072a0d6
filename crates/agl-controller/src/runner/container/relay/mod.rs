//! The way of a container without network to the gateway.
//!
//! ```text
//! agent ── TCP ──▶ `relay inside` ── Unix socket ──▶ `relay outside` ── TCP ──▶ gateway
//! └──────── in the container ─────┘  in a folder     └── on the host ──┘
//!                                    that both see
//! ```
//!
//! The container's program is `relay inside`, which starts the agent's and serves one address of the loopback interface.
//! It is this very program, mounted read-only into the container together with its loader and its libraries, so that the
//! image need not know of it. `relay outside` is a process of the host that connects to the gateway and to nothing else;
//! it goes on when the controller is killed.
//!
//! * [`inside`] — the first process of a container.
//! * [`outside`] — the process on the host.
//! * [`stage`] — the folder that containers see.

pub mod inside;
pub mod outside;
mod stage;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::Mutex;

use crate::process_id::ProcessId;
use crate::work_dir::{read_record, write_record};

/// The folder as containers see it.
pub(super) const INSIDE: &str = "/agl/relay";
/// The port of the loopback interface that leads to the gateway.
const PORT: u16 = 14747;
/// The socket in that folder.
const SOCKET: &str = "gateway.sock";
/// The variable with the token that the relay puts before its own complaint. The agent does not get it.
pub(super) const TOKEN: &str = "AGL_RELAY_TOKEN";
/// How long the process on the host has to say that it listens.
const READY: Duration = Duration::from_secs(10);

/// Runs one end of a relay. Call it before any async runtime or thread is started.
#[must_use]
pub fn main(words: &[String]) -> ExitCode {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["inside", port, socket, command @ ..] if !command.is_empty() => inside::run(port, Path::new(socket), command),
        ["outside", folder, address] => outside::run(Path::new(folder), address).map(|()| ExitCode::SUCCESS),
        _ => Err(io::Error::other("relay: it is the controller's to call")),
    };
    outcome.unwrap_or_else(|error| {
        use std::io::Write;
        let _ = writeln!(io::stderr(), "agl relay: {error}");
        ExitCode::FAILURE
    })
}

/// How a container reaches the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Way {
    /// What is mounted at [`INSIDE`].
    pub(super) folder: PathBuf,
    /// What stands before the program of the container.
    pub(super) command: Vec<String>,
}

/// The relay of one controller's containers.
#[derive(Debug)]
pub(super) struct Relay {
    folder: PathBuf,
    record: PathBuf,
    program: PathBuf,
    address: String,
    /// Held while it is being put up.
    way: Mutex<Option<Way>>,
}

/// Who runs on the host, as a later controller finds it.
#[derive(Debug, Serialize, Deserialize)]
struct Outside {
    process: ProcessId,
    address: String,
}

impl Relay {
    /// One to the gateway at `address`, with all that it needs below `root`.
    pub(super) fn new(root: &Path, program: PathBuf, address: String) -> Self {
        Self { folder: root.join("relay"), record: root.join("relay.json"), program, address, way: Mutex::new(None) }
    }

    /// Makes sure that it is there.
    ///
    /// # Errors
    /// Why it cannot be.
    pub(super) async fn ready(&self) -> io::Result<Way> {
        let mut way = self.way.lock().await;
        let way = match &*way {
            Some(way) => way.clone(),
            None => {
                let mut command = stage::furnish(&self.folder, &self.program)?;
                let socket = format!("{INSIDE}/{SOCKET}");
                command.extend(["relay".to_owned(), "inside".to_owned(), PORT.to_string(), socket]);
                way.insert(Way { folder: self.folder.clone(), command }).clone()
            }
        };
        match read_record::<Outside>(&self.record).filter(|outside| outside.process.is_alive()) {
            Some(outside) if outside.address == self.address => return Ok(way),
            Some(outside) => outside.process.signal(Signal::SIGTERM),
            None => {}
        }
        self.start().await?;
        Ok(way)
    }

    async fn start(&self) -> io::Result<()> {
        let mut command = tokio::process::Command::new(&self.program);
        command.arg0("agl").args(["relay", "outside"]).arg(&self.folder).arg(&self.address);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or_else(|| io::Error::other("the relay has no pipe"))?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
        let line = tokio::time::timeout(READY, BufReader::new(stdout).lines().next_line()).await;
        if !matches!(line, Ok(Ok(Some(_)))) {
            let _ = child.start_kill();
            let output = child.wait_with_output().await?;
            let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(io::Error::other(format!("the relay does not start: {reason}")));
        }
        let process = pid.and_then(ProcessId::of).ok_or_else(|| io::Error::other("the relay ended at once"))?;
        write_record(&self.record, &Outside { process, address: self.address.clone() })?;
        // It is waited for, so that it is no zombie should it end while we run.
        tokio::spawn(async move { child.wait().await });
        Ok(())
    }

    /// Ends the process on the host: no container needs it any more.
    pub(super) fn close(&self) {
        if let Some(outside) = read_record::<Outside>(&self.record) {
            outside.process.signal(Signal::SIGTERM);
            let _ = std::fs::remove_file(&self.record);
        }
        // One that was started and not written down ends without its socket.
        let _ = std::fs::remove_file(self.folder.join(SOCKET));
    }
}

/// The gateway's address to connect to, and its URL as containers reach it through the relay.
///
/// # Errors
/// Why there is no such way.
pub(super) fn through(agent_url: &str) -> Result<(String, String), &'static str> {
    let rest = agent_url.strip_prefix("http://").ok_or(
        "containers reach the gateway through a relay, which cannot stand in for a server with a certificate: set \
         agent_url to an http:// address of the gateway, or container.network to a network that leads to it",
    )?;
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let address = if has_port { authority.to_owned() } else { format!("{authority}:80") };
    Ok((address, format!("http://127.0.0.1:{PORT}{}", path.trim_end_matches('/'))))
}

/// True where a URL leads to whoever uses it.
pub(super) fn leads_to_itself(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    ["localhost", "127.", "[::1]"].iter().any(|own| rest.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateways_path_is_kept_and_its_host_is_the_relay() {
        for (url, address, inside) in [
            ("http://127.0.0.1:8080", "127.0.0.1:8080", "http://127.0.0.1:14747"),
            ("http://gateway/", "gateway:80", "http://127.0.0.1:14747"),
            ("http://[::1]:80/agl/v1/", "[::1]:80", "http://127.0.0.1:14747/agl/v1"),
            ("http://[fd00::1]", "[fd00::1]:80", "http://127.0.0.1:14747"),
        ] {
            assert_eq!(through(url), Ok((address.to_owned(), inside.to_owned())), "{url}");
        }
        assert!(through("https://gateway").is_err());
    }
}
