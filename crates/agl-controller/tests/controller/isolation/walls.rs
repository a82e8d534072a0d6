//! What an agent reaches, reads and writes, and what it does not.

use std::path::Path;

use serde_json::{Value, json};

use super::{all_no, can, isolated, possible, run, said};
use crate::stage::{Stage, read, sh};

const SOCKETS: &str = r#"
import socket
def attempt(name, act):
    try:
        act()
        print(name + '=yes')
    except OSError as error:
        print(name + '=no')
def udp():
    query = b'\xab\xcd\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06secret\x07example\x03com\x00\x00\x01\x00\x01'
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)
    s.sendto(query, ('8.8.8.8', 53)); s.recvfrom(512)
def udp6():
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('2001:4860:4860::8888', 53))
attempt('tcp', lambda: socket.create_connection(('1.1.1.1', 443), 2))
attempt('udp', udp)
attempt('udp6', udp6)
attempt('dns', lambda: socket.getaddrinfo('secret.example.com', 80))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt('vsock', lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
"#;

#[tokio::test]
async fn an_agent_reaches_the_gateway_and_nothing_else() {
    if !possible() {
        return;
    }
    let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = other.local_addr().unwrap().port();
    std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let script = [
        "curl -sS -o /dev/null -w 'gateway=%{http_code}\\n' $AGL_OPENAI_BASE_URL/models\n",
        "curl -sS -o /dev/null -w 'event=%{http_code}\\n' -H \"authorization: Bearer $AGL_KEY\" \
         --json '{\"event_type\": \"note\", \"data\": {}}' $AGL_EVENT_URL\n",
        "echo url=$OPENAI_BASE_URL\necho rendered=$RENDERED\n",
        &can("neighbour", &format!("curl -sS --noproxy '*' -m 3 http://127.0.0.1:{port}")),
        &can("outside", "curl -sS --noproxy '*' -m 3 http://1.1.1.1"),
        &can("name", "curl -sS --noproxy '*' -m 3 http://example.com"),
        &can("pip", "pip download --no-cache-dir --retries 0 --timeout 3 -d . six"),
        &can("pip_past_proxy", "env -u HTTPS_PROXY -u https_proxy -u ALL_PROXY -u all_proxy pip download --no-cache-dir --retries 0 --timeout 3 -d . six"),
        &can("git", "git clone https://github.com/octocat/Hello-World"),
        "echo devices=$(ls /proc/sys/net/ipv4/conf | tr '\\n' ' ')\n",
        &format!("cat > sockets.py <<'END'\n{SOCKETS}\nEND\npython3 sockets.py\n"),
    ]
    .concat();
    let config = json!({"process": {"argv": ["sh", "-c", script], "env": {"RENDERED": "{{ anthropic_base_url }}"}}});
    let (stage, id) = run(isolated(json!({})), config).await;
    let said = said(&stage, &id);
    assert_eq!(said["gateway"], "200", "{}", read(stage.attempt(&id, "0").stderr()));
    assert_eq!(said["event"], "200");
    assert!(stage.gateway.events().iter().any(|event| event["body"]["event_type"] == "note"));
    assert_eq!(said["url"], "http://127.0.0.1:4477/proxy/rollout/r0/attempt/0/mode/train/openai/v1");
    assert_eq!(said["rendered"], "http://127.0.0.1:4477/proxy/rollout/r0/attempt/0/mode/train/anthropic");
    all_no(&said, &["neighbour", "outside", "name", "pip", "pip_past_proxy", "git"]);
    all_no(&said, &["tcp", "udp", "udp6", "dns", "raw", "packet", "vsock"]);
    assert_eq!(said["devices"].trim(), "all default lo");
}

#[tokio::test]
async fn attempts_through_the_proxy_are_refused_and_become_events_while_the_agents_key_is_good() {
    if !possible() {
        return;
    }
    let script = "curl -s -m 5 -w 'code=%{http_code}\\n' http://user:secret@example.com/page\n\
                  curl -s -m 5 https://pypi.org/simple/\n\
                  pip download --no-cache-dir --retries 0 -d . six";
    let (stage, id) = run(isolated(json!({})), sh(script)).await;
    let output = read(stage.attempt(&id, "0").stdout());
    assert!(output.contains("the network is closed to this agent") && output.contains("code=403"), "{output}");
    let events = stage.gateway.events();
    let refused: Vec<&Value> = events.iter().map(|event| &event["body"]["data"]).collect();
    assert_eq!(refused[0], &json!({"method": "GET", "host": "example.com", "port": 80}));
    assert_eq!(refused[1], &json!({"method": "CONNECT", "host": "pypi.org", "port": 443}));
    assert_eq!(refused[2], &json!({"method": "CONNECT", "host": "pypi.org", "port": 443}));
    assert!(events.iter().all(|event| event["body"]["event_type"] == "network_refused"));
    assert!(events.iter().all(|event| event["key"] == "Bearer agent-r0-0"), "{events:#?}");
    let calls = stage.gateway.calls();
    let place = |call: &str| calls.iter().rposition(|made| made == call).unwrap();
    assert!(place("EVENT r0/0") < place("PATCH r0/0 agent_ended"), "{calls:#?}");
}

#[tokio::test]
async fn of_many_refused_attempts_the_first_are_told_and_the_others_counted() {
    if !possible() {
        return;
    }
    let script = "import socket\nfor n in range(130):\n    s = socket.create_connection(('127.0.0.1', 4478))\n    \
                  s.sendall(b'CONNECT host%d:443 HTTP/1.1\\r\\n\\r\\n' % n)\n    s.recv(1000)\n    s.close()\n";
    let (stage, id) = run(isolated(json!({})), json!({"process": {"argv": ["python3", "-c", script]}})).await;
    let events = stage.gateway.events();
    assert_eq!(events.len(), 101, "{}", read(stage.attempt(&id, "0").stderr()));
    assert_eq!(events[99]["body"]["data"]["host"], "host99");
    assert_eq!(events[100]["body"]["data"], json!({"further": 30}));
}

#[tokio::test]
async fn an_agent_writes_into_its_own_places_and_sees_nothing_of_other_attempts() {
    if !possible() {
        return;
    }
    let mut stage = Stage::empty().await;
    let folder = stage.folder.path().to_owned();
    for name in ["data", "given", "secret"] {
        std::fs::create_dir(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("file"), name).unwrap();
    }
    std::fs::create_dir(folder.join("data/secret")).unwrap();
    std::fs::write(folder.join("data/secret/file"), "deeper").unwrap();
    let neighbour = stage.attempt("r9", "0").path().to_owned();
    std::fs::create_dir_all(neighbour.join("work")).unwrap();
    std::fs::write(neighbour.join("input.json"), "other").unwrap();
    let here = folder.display();
    let script = [
        can("work", "echo x > file && cat file"),
        can("tmp", "echo x > /tmp/file && echo x > /var/tmp/file && echo x > /dev/shm/file"),
        can("home", "test $HOME = /tmp/home && echo x > $HOME/file"),
        can("input", "grep 2+2 $AGL_INPUT"),
        can("data", &format!("grep data {here}/data/file && echo x > {here}/data/new")),
        can("given", &format!("grep given {here}/given/file")),
        can("terminal", "python3 -c 'import pty, os; print(os.ttyname(pty.openpty()[1]))'"),
        can("random", "head -c 1 /dev/urandom > /dev/null && echo x > /dev/null"),
        can("change_input", "echo x > $AGL_INPUT"),
        can("change_given", &format!("echo x > {here}/given/file")),
        can("secret", &format!("cat {here}/secret/file || cat {here}/data/secret/file")),
        can("neighbour", &format!("cat {}/input.json", neighbour.display())),
        can("records", "ls .. | grep -E 'supervisor|agent|exit'"),
        can("root", "echo x > /agl-was-here"),
        can("etc", "echo x > /etc/agl-was-here"),
        can("usr", "touch /usr/bin/agl-was-here"),
        can("sys", "echo 1 > /sys/kernel/mm/ksm/run"),
        can("core_pattern", "echo core > /proc/sys/kernel/core_pattern"),
        can("sysrq", "echo h > /proc/sysrq-trigger"),
        can("remount", "mount -o remount,bind,rw /"),
        can("unmount", &format!("umount {here}/work || umount /tmp")),
        can("namespace", "unshare -Ur true"),
        can("disk", "find /dev -type b | grep . || mknod disk b 254 0"),
        can("run", "find /run -mindepth 1 | grep ."),
        can("privileges", "grep -E 'CapEff' /proc/self/status | grep -vE '0{16}'"),
        can("kill", &format!("kill -0 {}", std::process::id())),
        can("processes", "ls /proc | grep -E '^[0-9]{3,}$'"),
        can("first", "kill -9 1; cat /proc/1/environ"),
        can("ipc", "ipcs -m | grep 0x"),
        "echo files=$(ls | tr '\\n' ' ')\n".to_owned(),
    ]
    .concat();
    let hidden = [folder.join("secret"), folder.join("data/secret")];
    // All lies below /tmp, which is private: only what is named is there.
    stage.start(isolated(json!({
        "writable": [folder.join("data")], "readable": [folder.join("given")], "hidden": hidden,
    })));
    let id = stage.gateway.create(sh(&script));
    stage.gateway.ended(&id).await;
    let said = said(&stage, &id);
    for name in ["work", "tmp", "home", "input", "data", "given", "terminal", "random"] {
        let why = read(stage.attempt(&id, "0").work().join("tried"));
        assert_eq!(said.get(name).map(String::as_str), Some("yes"), "{name}: {said:#?}\n{why}");
    }
    all_no(&said, &["change_input", "change_given", "secret", "neighbour", "records", "root", "etc", "usr", "sys"]);
    all_no(&said, &["core_pattern", "sysrq", "remount", "unmount", "namespace", "disk", "run", "privileges"]);
    all_no(&said, &["kill", "processes", "first", "ipc"]);
    assert_eq!(said["files"].trim(), "file tried");
    assert_eq!(read(folder.join("data/new")), "x\n");
    assert_eq!(read(stage.attempt(&id, "0").work().join("file")), "x\n");
    for path in ["/tmp/file", "/var/tmp/file", "/dev/shm/file", "/tmp/home"] {
        assert!(!Path::new(path).exists(), "{path} is none of the machine's");
    }
}
