//! Tests with a server on the loopback interface that says what it is told to say.

#![allow(clippy::unwrap_used)]

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader},
    net::TcpListener,
    sync::{Arc, Mutex},
    thread,
};

use super::*;

/// A server: one answer for every path, and what it was asked.
struct Server {
    url: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(answers: &[(&str, &[u8])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answers: HashMap<String, Vec<u8>> =
            answers.iter().map(|(path, answer)| ((*path).to_owned(), answer.to_vec())).collect();
        let log = Arc::clone(&asked);
        // It ends with the tests.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let request = lines.next().unwrap().unwrap();
                while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
                let path = request.split(' ').nth(1).unwrap().to_owned();
                log.lock().unwrap().push(path.clone());
                let answer = answers.get(&path).cloned();
                let answer = answer.unwrap_or_else(|| b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec());
                // The client may have heard enough.
                let _ = stream.write_all(&answer);
            }
        });
        Self { url, asked }
    }

    fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

fn ok(content: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", content.len()).as_bytes(), content].concat()
}

fn client(servers: &[&Server], cache: &std::path::Path, limit: u64) -> Debuginfod {
    let servers = servers.iter().map(|server| server.url.clone()).collect();
    Debuginfod::new(Settings { servers, cache: cache.into(), limit })
}

fn content(file: Option<File>) -> Option<Vec<u8>> {
    file.map(|mut file| {
        use std::io::Seek as _;
        file.rewind().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

#[test]
fn fetched_once_then_from_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let (without, with) = (Server::start(&[]), Server::start(&[("/buildid/abcd/debuginfo", &ok(b"debug file"))]));
    let client = client(&[&without, &with], &cache.path().join("new"), 100);
    for _ in 0..2 {
        assert_eq!(content(client.debug_file("abcd").unwrap()).as_deref(), Some(&b"debug file"[..]));
    }
    assert_eq!((without.asked(), with.asked()), (1, 1));
    // As other clients keep it.
    assert_eq!(fs::read(cache.path().join("new/abcd/debuginfo")).unwrap(), b"debug file");
    assert_eq!(client.debug_file("ef01").unwrap().map(|_| ()), None);
    assert!(!cache.path().join("new/ef01").exists());
}

#[test]
fn what_servers_may_not_do() {
    let cache = tempfile::tempdir().unwrap();
    let endless =
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(), b"8\r\n01234567\r\n".repeat(1000)].concat();
    let server = Server::start(&[
        ("/buildid/aa/debuginfo", &ok(&[7; 101])),
        ("/buildid/bb/debuginfo", &endless),
        ("/buildid/cc/debuginfo", b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n"),
        ("/buildid/dd/debuginfo", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort"),
        ("/buildid/ee/debuginfo", &ok(b"")),
        ("/buildid/ff/debuginfo", b"no HTTP"),
    ]);
    for id in ["aa", "bb", "cc", "dd", "ff"] {
        // A client of its own, since one gives up a server that fails again and again.
        assert!(client(&[&server], cache.path(), 100).debug_file(id).is_err(), "{id}");
        assert!(!cache.path().join(id).exists(), "{id}");
    }
    assert!(client(&[&server], cache.path(), 100).debug_file("ee").unwrap().is_none());
}

#[test]
fn a_server_that_fails_is_given_up() {
    let cache = tempfile::tempdir().unwrap();
    let failure: &[u8] = b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n";
    let server = Server::start(&[("/buildid/aa/debuginfo", failure)]);
    let client = client(&[&server], cache.path(), 100);
    for _ in 0..MAX_FAILURES {
        assert!(client.debug_file("aa").is_err());
    }
    assert!(client.debug_file("aa").unwrap().is_none());
    assert_eq!(server.asked(), MAX_FAILURES as usize);
}

#[test]
fn the_environment() {
    let settings = |variables: &[(&str, &str)]| {
        let variables: HashMap<String, String> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Settings::of(|name| variables.get(name).cloned())
    };
    let urls = ("DEBUGINFOD_URLS", "https://a.example/ file:///etc ima:x http://b.example:8002");
    let found = settings(&[urls, ("HOME", "/home/u")]).unwrap();
    assert_eq!(found.servers, ["https://a.example", "http://b.example:8002"]);
    assert_eq!(found.cache, std::path::Path::new("/home/u/.cache/debuginfod_client"));
    let xdg = [urls, ("HOME", "/home/u"), ("XDG_CACHE_HOME", "/x")];
    assert_eq!(settings(&xdg).unwrap().cache, std::path::Path::new("/x/debuginfod_client"));
    let own = [urls, ("XDG_CACHE_HOME", "/x"), ("DEBUGINFOD_CACHE_PATH", "/own")];
    assert_eq!(settings(&own).unwrap().cache, std::path::Path::new("/own"));
    assert_eq!(settings(&[("HOME", "/home/u")]), None);
    assert_eq!(settings(&[urls]), None);
    assert_eq!(settings(&[("DEBUGINFOD_URLS", "ftp://x"), ("HOME", "/h")]), None);
}
