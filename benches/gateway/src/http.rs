//! As much of HTTP/1.1 as the two ends of a benchmark need: messages whose length is given, on connections that stay open.

use anyhow::{Context, bail};
use bytes::Buf;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A connection and what has been read of it.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// A message in the connection's buffer.
pub struct Message {
    /// The first line.
    pub start: String,
    body: std::ops::Range<usize>,
}

impl Connection {
    pub fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(64 * 1024) })
    }

    pub async fn open(address: &str) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("nobody answers at {address}"))?;
        Ok(Self::new(stream)?)
    }

    /// Sends a message.
    pub async fn send(&mut self, head: &[u8], body: &[u8]) -> std::io::Result<()> {
        self.stream.write_all_buf(&mut Buf::chain(head, body)).await
    }

    /// The next message; `None` where the other end has closed the connection instead.
    pub async fn receive(&mut self) -> anyhow::Result<Option<Message>> {
        self.buffer.clear();
        let mut looked = 0_usize;
        let head = loop {
            let from = looked.saturating_sub(3);
            if let Some(found) = self.buffer[from..].windows(4).position(|four| four == b"\r\n\r\n") {
                break from + found + 4;
            }
            looked = self.buffer.len();
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { bail!("a message broke off") };
            }
        };
        let mut lines = std::str::from_utf8(&self.buffer[..head]).context("a message's head is no text")?.split("\r\n");
        let start = lines.next().unwrap_or_default().to_owned();
        let mut length = None;
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.eq_ignore_ascii_case("content-length") {
                length = Some(value.trim().parse::<usize>().with_context(|| line.to_owned())?);
            }
        }
        // An answer without content says so by its status.
        let length = length.or_else(|| start.contains(" 204").then_some(0));
        let end = head + length.with_context(|| format!("{start:?} does not say how long it is"))?;
        self.buffer.reserve(end.saturating_sub(self.buffer.len()));
        while self.buffer.len() < end {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                bail!("a message broke off");
            }
        }
        Ok(Some(Message { start, body: head..end }))
    }

    pub fn body(&self, message: &Message) -> &[u8] {
        &self.buffer[message.body.clone()]
    }

    /// Sends a request and gives the answer's status.
    pub async fn call(&mut self, head: &[u8], body: &[u8]) -> anyhow::Result<(u16, Message)> {
        self.send(head, body).await?;
        let answer = self.receive().await?.context("the connection was closed before the answer")?;
        let status = answer.start.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.with_context(|| answer.start.clone())?, answer))
    }
}

/// A request's head.
pub fn head(method: &str, path: &str, key: &str, length: usize) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}
