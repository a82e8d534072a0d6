//! Sockets that can be reset in the middle of an exchange.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// Accepts [`ResettableStream`]s.
pub struct ResettableListener(pub TcpListener);

impl Listener for ResettableListener {
    type Io = ResettableStream;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, address) = Listener::accept(&mut self.0).await;
        (ResettableStream { stream, reset: ResetSwitch::default() }, address)
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

/// Thrown by a handler, it makes the handler's connection end with RST at the next write.
#[derive(Clone, Debug, Default)]
pub struct ResetSwitch(Arc<AtomicBool>);

impl ResetSwitch {
    /// Resets the connection as soon as the handler has returned anything.
    pub fn throw(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Connected<IncomingStream<'_, ResettableListener>> for ResetSwitch {
    fn connect_info(stream: IncomingStream<'_, ResettableListener>) -> Self {
        stream.io().reset.clone()
    }
}

/// A TCP stream with a [`ResetSwitch`].
pub struct ResettableStream {
    stream: TcpStream,
    reset: ResetSwitch,
}

impl ResettableStream {
    fn check(&self) -> std::io::Result<()> {
        if self.reset.0.load(Ordering::Acquire) {
            // Closing with a linger of zero sends RST instead of FIN.
            self.stream.set_zero_linger()?;
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }
}

impl AsyncRead for ResettableStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for ResettableStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
