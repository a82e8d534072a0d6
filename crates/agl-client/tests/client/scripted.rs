//! A server that plays back answers, one connection each, and notes what it was asked. It can also hang up instead of
//! answering, which no HTTP framework does.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What one connection gets.
#[derive(Clone, Debug)]
pub enum Step {
    /// A whole answer.
    Answer(u16, String),
    /// An answer with this status that breaks off before its end.
    Broken(u16),
    /// The request is read, then the connection closes.
    HangUp,
    /// A server-sent event stream that sends this and closes.
    Stream(String),
}

/// What was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub line: String,
    pub head: String,
    pub body: String,
}

pub struct Scripted {
    pub url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Scripted {
    pub async fn start(steps: Vec<Step>) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), steps)
    }

    pub fn on(listener: TcpListener, steps: Vec<Step>) -> Self {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = asked.clone();
        tokio::spawn(async move {
            for step in steps {
                let (mut stream, _) = listener.accept().await.unwrap();
                let request = read_request(&mut stream).await;
                log.lock().unwrap().push(request);
                match step {
                    Step::HangUp => {}
                    Step::Broken(status) => {
                        let answer =
                            format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: 99\r\n\r\n{{");
                        stream.write_all(answer.as_bytes()).await.unwrap();
                    }
                    Step::Answer(status, body) => {
                        let answer = format!(
                            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                            body.len()
                        );
                        stream.write_all(answer.as_bytes()).await.unwrap();
                    }
                    Step::Stream(body) => {
                        let answer = format!(
                            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{body}"
                        );
                        stream.write_all(answer.as_bytes()).await.unwrap();
                    }
                }
                stream.shutdown().await.ok();
            }
            // Whoever comes later waits: a script that is too short must not look like a gateway that is away.
            std::future::pending::<()>().await;
        });
        Self { url, asked }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    pub fn lines(&self) -> Vec<String> {
        self.asked().into_iter().map(|asked| asked.line).collect()
    }
}

async fn read_request(stream: &mut TcpStream) -> Asked {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .filter_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:").map(str::to_owned))
                .find_map(|value| value.trim().parse::<usize>().ok())
                .unwrap_or(0);
            if body.len() >= length {
                let line = head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
                return Asked { line, head: head.to_ascii_lowercase(), body: body.to_owned() };
            }
        }
        let mut chunk = [0; 4096];
        let read = stream.read(&mut chunk).await.unwrap();
        assert!(read > 0, "the client hung up in the middle of a request");
        bytes.extend_from_slice(&chunk[..read]);
    }
}
