//! Debug files from debuginfod servers.
//!
//! Off unless it is asked for. What other clients have fetched is used, and what is fetched is kept for them: the cache
//! directory has their layout (debuginfod_find_debuginfo(3)).

use std::{
    env, fs,
    fs::File,
    io::{self, Read as _, Write as _},
    path::PathBuf,
    time::Duration,
};

use ureq::Agent;

/// Most bytes of a debug file that are fetched.
const MAX_BYTES: u64 = 2 << 30;
/// How long a server may take to answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a file may take.
const TRANSFER: Duration = Duration::from_secs(300);
/// Failures after which a server is not asked any more: each may take as long as [`ANSWER`].
const MAX_FAILURES: u32 = 2;

/// Why nothing was fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The server can't be reached, or fails.
    #[error("{server}: {reason}")]
    Server {
        /// Its URL.
        server: String,
        /// What happened.
        reason: String,
    },
    /// The cache can't be used.
    #[error("the cache {}: {source}", path.display())]
    Cache {
        /// Its directory.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
}

/// Where debug files are fetched from and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// URLs of the servers, in the order in which they are asked.
    pub servers: Vec<String>,
    /// Directory of the cache.
    pub cache: PathBuf,
    /// Most bytes of one file.
    pub limit: u64,
}

impl Settings {
    /// What the environment says: servers in `DEBUGINFOD_URLS`, the cache in `DEBUGINFOD_CACHE_PATH`, or in
    /// `debuginfod_client` in `XDG_CACHE_HOME` or `~/.cache`. `None` if there is no server, or no place for a cache.
    pub fn from_environment() -> Option<Self> {
        Self::of(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let servers: Vec<String> = variable("DEBUGINFOD_URLS")?
            .split_ascii_whitespace()
            .filter(|url| url.starts_with("http://") || url.starts_with("https://"))
            .map(|url| url.trim_end_matches('/').to_owned())
            .collect();
        let cache = match variable("DEBUGINFOD_CACHE_PATH") {
            Some(path) => PathBuf::from(path),
            None => match variable("XDG_CACHE_HOME") {
                Some(home) => PathBuf::from(home),
                None => PathBuf::from(variable("HOME")?).join(".cache"),
            }
            .join("debuginfod_client"),
        };
        (!servers.is_empty()).then_some(Self { servers, cache, limit: MAX_BYTES })
    }
}

/// A client.
pub struct Debuginfod {
    settings: Settings,
    agent: Agent,
    failures: std::cell::RefCell<Vec<u32>>,
}

impl Debuginfod {
    /// Nothing is fetched yet.
    pub fn new(settings: Settings) -> Self {
        let agent = Agent::config_builder()
            .timeout_connect(Some(ANSWER))
            .timeout_recv_response(Some(ANSWER))
            .timeout_recv_body(Some(TRANSFER))
            .user_agent(concat!("memtrace/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        let failures = vec![0; settings.servers.len()].into();
        Self { settings, agent, failures }
    }

    /// The debug file for a build ID (lower-case hexadecimal digits), from the cache or a server. `None` if no server
    /// has it.
    ///
    /// # Errors
    /// No server has it, and at least one failed; or the cache can't be written.
    pub fn debug_file(&self, build_id: &str) -> Result<Option<File>, FetchError> {
        let directory = self.settings.cache.join(build_id);
        let path = directory.join("debuginfo");
        // An empty file says that the servers did not have it (debuginfod's own client leaves those too).
        if let Ok(file) = File::open(&path)
            && file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0)
        {
            return Ok(Some(file));
        }
        let mut failure = None;
        for (number, server) in self.settings.servers.iter().enumerate() {
            if self.failures.borrow().get(number).is_some_and(|failures| *failures >= MAX_FAILURES) {
                continue;
            }
            let cache = |source| FetchError::Cache { path: self.settings.cache.clone(), source };
            fs::create_dir_all(&directory).map_err(cache)?;
            let mut file = tempfile::NamedTempFile::new_in(&directory).map_err(cache)?;
            match self.fetch(&format!("{server}/buildid/{build_id}/debuginfo"), file.as_file_mut()) {
                Ok(true) => return file.persist(&path).map(Some).map_err(|error| cache(error.error)),
                Ok(false) => {}
                Err(reason) => {
                    if let Some(failures) = self.failures.borrow_mut().get_mut(number) {
                        *failures += 1;
                    }
                    failure = Some(FetchError::Server { server: server.clone(), reason });
                }
            }
        }
        // Leaves no empty directory behind; one with a file in it stays.
        let _ = fs::remove_dir(&directory);
        failure.map_or(Ok(None), Err)
    }

    /// Fetches one file; false if the server does not have it.
    fn fetch(&self, url: &str, out: &mut File) -> Result<bool, String> {
        let response = match self.agent.get(url).call() {
            Ok(response) => response,
            Err(ureq::Error::StatusCode(404)) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        let limit = self.settings.limit;
        let mut body = response.into_body().into_reader().take(limit.saturating_add(1));
        let size = io::copy(&mut body, out).map_err(|error| error.to_string())?;
        if size > limit {
            return Err(format!("the debug file is larger than {limit} bytes"));
        }
        out.flush().map_err(|error| error.to_string())?;
        // An empty answer is not a file.
        Ok(size > 0)
    }
}

#[cfg(test)]
#[path = "debuginfod_tests.rs"]
mod tests;
