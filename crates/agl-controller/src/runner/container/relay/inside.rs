//! The end inside: the first process of a container. It starts the container's program and serves the address that leads
//! to the gateway. As the first process it passes on what the engine signals, and waits for orphans; when it ends, the
//! kernel ends all others.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::TOKEN;

/// The exit code of a program that could not be started, as shells have it.
pub(in crate::runner::container) const NOT_STARTED: u8 = 127;
/// How long a connection waits for the process on the host: a controller that was restarted may be starting it.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(100);
/// What the engine may send; all goes to the program.
const PASSED_ON: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Runs `command` and the relay until it ends.
///
/// # Errors
/// What the system says about anything but the start of `command`.
pub fn run(port: &str, socket: &Path, command: &[&str]) -> io::Result<ExitCode> {
    let port: u16 = port.parse().map_err(io::Error::other)?;
    // The token is in our environment; without this the agent could read it there.
    nix::sys::prctl::set_dumpable(false)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(relay(port, socket, command))
}

async fn relay(port: u16, socket: &Path, command: &[&str]) -> io::Result<ExitCode> {
    let (sender, mut signals) = mpsc::unbounded_channel();
    for passed in PASSED_ON {
        let mut stream = signal(SignalKind::from_raw(passed as i32))?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while stream.recv().await.is_some() {
                let _ = sender.send(passed);
            }
        });
    }
    let mut children = signal(SignalKind::child())?;
    let door = match TcpListener::bind(("127.0.0.1", port)).await {
        Ok(door) => door,
        Err(error) => return Ok(complain(&format!("its way to the gateway cannot be opened: {error}"))),
    };
    let serving = tokio::spawn(serve(door, socket.to_owned()));
    let (program, arguments) = command.split_first().ok_or_else(|| io::Error::other("nothing to run"))?;
    let child = match Command::new(program).args(arguments).env_remove(TOKEN).spawn() {
        Ok(child) => Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?),
        Err(error) => return Ok(complain(&format!("cannot start {program:?}: {error}"))),
    };
    loop {
        tokio::select! {
            Some(passed) = signals.recv() => drop(kill(child, passed)),
            _ = children.recv() => if let Some(code) = reap(child) {
                serving.abort();
                return Ok(ExitCode::from(code));
            },
        }
    }
}

/// Says, so that only the controller can know that it is we who say it, why the program does not run.
fn complain(reason: &str) -> ExitCode {
    use std::io::Write;
    let _ = writeln!(io::stderr(), "agl relay {}: {reason}", std::env::var(TOKEN).unwrap_or_default());
    ExitCode::from(NOT_STARTED)
}

/// Waits for all that has ended, and tells the exit code of `child` if it is among them.
fn reap(child: Pid) -> Option<u8> {
    let mut code = None;
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, status)) if pid == child => code = u8::try_from(status & 0xff).ok(),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => {
                code = u8::try_from(128 + signal as i32).ok();
            }
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return code,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return code,
        }
    }
}

async fn serve(door: TcpListener, socket: PathBuf) {
    let mut connections = JoinSet::new();
    loop {
        match door.accept().await {
            Ok((inside, _)) => drop(connections.spawn(carry(inside, socket.clone()))),
            // Out of descriptors, perhaps: some will come back.
            Err(_) => tokio::time::sleep(LOOK).await,
        }
        while connections.try_join_next().is_some() {}
    }
}

/// A gateway that cannot be reached is to the agent a connection that closes.
async fn carry(mut inside: TcpStream, socket: PathBuf) {
    let connected = async {
        loop {
            match UnixStream::connect(&socket).await {
                Ok(outside) => return outside,
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    };
    let Ok(mut outside) = tokio::time::timeout(PATIENCE, connected).await else { return };
    let _ = inside.set_nodelay(true);
    let _ = copy_bidirectional(&mut inside, &mut outside).await;
}
