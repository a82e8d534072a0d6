//! `agl-mock-llm`: the scripted model server as a process of its own.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use agl_mock_llm::{Answer, FaultRule, MockLlm, Script, fault_flag};
use anyhow::Context;
use clap::Parser;

/// A scripted stand-in for a vLLM server, with faults on demand.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Name of the model.
    #[arg(long)]
    model: Option<String>,
    /// A script as JSON: {"answers": ["text", {"tool_calls": [{"name": …, "arguments": …}]}, {"raw": "…"}], "select": "turn", …}
    #[arg(long)]
    script: Option<PathBuf>,
    /// An answer; repeat it for more. Without a script and without answers the server echoes.
    #[arg(long)]
    answer: Vec<String>,
    /// A fault: KIND[=VALUE][@NUMBER,… | %PROBABILITY], such as 503@0,1 or reset%0.1; repeat it for more.
    #[arg(long, value_parser = fault_flag::parse)]
    fault: Vec<FaultRule>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let mut script = match &options.script {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read the script {}", path.display()))?;
            serde_json::from_str(&text).with_context(|| format!("{} is no script", path.display()))?
        }
        None => Script::default(),
    };
    if let Some(model) = options.model {
        script.model = model;
    }
    script.answers.extend(options.answer.into_iter().map(Answer::Text));
    script.faults.extend(options.fault);
    let address = SocketAddr::new(options.host, options.port);
    let server = MockLlm::start_on(address, script)
        .await
        .with_context(|| format!("cannot listen on {address}; choose another --port"))?;
    writeln!(std::io::stdout(), "{}", server.endpoint())?;
    tokio::select! {
        () = server.wait() => {}
        result = tokio::signal::ctrl_c() => result?,
    }
    Ok(())
}
