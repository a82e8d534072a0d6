//! A canned inference server: finds the number of the turn near the end of a request and sends that turn's answer.

use std::sync::Arc;

use anyhow::Context;
use tokio::net::{TcpListener, TcpStream};

use crate::http::Connection;
use crate::script::{Script, Shape};

#[derive(clap::Args)]
pub struct UpstreamArgs {
    /// Where to listen.
    #[arg(long)]
    listen: String,
    /// Whose answers it gives.
    #[arg(long)]
    shape: Shape,
}

pub async fn serve(args: UpstreamArgs) -> anyhow::Result<()> {
    let script = Arc::new(Script::of(args.shape)?);
    let listener = TcpListener::bind(&args.listen).await.with_context(|| args.listen.clone())?;
    loop {
        let (stream, _) = listener.accept().await?;
        let script = Arc::clone(&script);
        tokio::spawn(async move {
            // Whoever goes away in the middle of a call has been stopped.
            drop(answer_all(stream, &script).await);
        });
    }
}

async fn answer_all(stream: TcpStream, script: &Script) -> anyhow::Result<()> {
    let mut connection = Connection::new(stream)?;
    while let Some(request) = connection.receive().await? {
        let turn = turn_of(connection.body(&request)).and_then(|number| script.turns.get(number));
        let (status, body) = match turn {
            Some(turn) => ("200 OK", turn.answer.as_slice()),
            None => ("400 Bad Request", &b"{\"error\": {\"message\": \"no turn of the script\"}}"[..]),
        };
        let head =
            format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        connection.send(head.as_bytes(), body).await?;
    }
    Ok(())
}

fn turn_of(body: &[u8]) -> Option<usize> {
    let end = &body[body.len().saturating_sub(256)..];
    let at = end.windows(5).rposition(|five| five == b"turn-")? + 5;
    std::str::from_utf8(end.get(at..at + 4)?).ok()?.parse().ok()
}
