//! The end on the host: it takes connections from the socket in the folder that containers see, and leads them to the
//! gateway and nowhere else. It ends when its socket is gone or another process has taken its place.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use super::SOCKET;

/// How often it looks whether its socket is still there.
const LOOK: Duration = Duration::from_secs(2);
/// How long the gateway has to take a connection.
const CONNECT: Duration = Duration::from_secs(30);

/// Serves until it is told to end.
///
/// # Errors
/// Where the socket cannot be made.
pub fn run(folder: &Path, address: &str) -> io::Result<()> {
    // A terminal's Ctrl-C and the death of the controller pass it by.
    let _ = nix::unistd::setsid();
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve(folder, address))
}

async fn serve(folder: &Path, address: &str) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    // Through the descriptor the path is short enough for a socket's name, wherever the folder is.
    let open = File::open(folder)?;
    let path = Path::new("/proc/self/fd").join(open.as_raw_fd().to_string()).join(SOCKET);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let door = UnixListener::bind(&path)?;
    // Agents run as all kinds of users. Who is outside of containers does not come through the folders above.
    std::fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    let inode = std::fs::metadata(&path)?.ino();
    writeln!(io::stdout(), "ready")?;
    let mut connections = JoinSet::new();
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            accepted = door.accept() => match accepted {
                Ok((inside, _)) => drop(connections.spawn(carry(inside, address.to_owned()))),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            _ = look.tick() => {
                if !std::fs::metadata(folder.join(SOCKET)).is_ok_and(|found| found.ino() == inode) {
                    return Ok(());
                }
            }
            _ = terminate.recv() => return Ok(()),
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn carry(mut inside: UnixStream, address: String) {
    let Ok(Ok(mut gateway)) = tokio::time::timeout(CONNECT, TcpStream::connect(address)).await else { return };
    let _ = gateway.set_nodelay(true);
    let _ = copy_bidirectional(&mut inside, &mut gateway).await;
}
