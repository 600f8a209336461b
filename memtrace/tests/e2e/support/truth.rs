//! What a fixture says it allocated.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::AddAssign,
};

use serde_json::Value;

/// Bytes and blocks of one call path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub bytes: u64,
    pub count: u64,
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.count += other.count;
    }
}

/// A call path, root first; the last name is the allocator function's.
pub type Path = Vec<String>;

/// Amounts by call path.
pub type Paths = BTreeMap<Path, Amount>;

/// A fixture's own account.
#[derive(Clone, Debug)]
pub struct Truth {
    /// Blocks live at the end.
    pub unfreed: Paths,
    /// All blocks allocated.
    pub all: Paths,
    /// Other numbers it knows.
    pub facts: BTreeMap<String, u64>,
}

impl Truth {
    /// Reads the line that a fixture prints.
    pub fn parse(line: &str) -> Self {
        let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("no truth: {error}: {line}"));
        let facts = value["facts"].as_object().expect("facts");
        Self {
            unfreed: paths(&value["paths"]),
            all: paths(&value["all"]),
            facts: facts.iter().map(|(name, value)| (name.clone(), value.as_u64().expect("a number"))).collect(),
        }
    }

    /// The outermost functions of its call paths: `main`, thread functions, constructors.
    pub fn roots(&self) -> BTreeSet<&str> {
        self.all.keys().map(|path| path[0].as_str()).collect()
    }

    /// The functions that call allocator functions.
    pub fn callers(&self) -> BTreeSet<&str> {
        self.all.keys().map(|path| path[path.len() - 2].as_str()).collect()
    }

    pub fn fact(&self, name: &str) -> u64 {
        *self.facts.get(name).unwrap_or_else(|| panic!("the fixture says nothing of {name}"))
    }
}

/// Functions that are one function under several names are reported under any of them.
pub fn canonical(function: &str) -> &str {
    if function == "aligned_alloc" && one_function() { "memalign" } else { function }
}

/// Whether this machine's C library, which is the fixtures' too, has one function for both names.
fn one_function() -> bool {
    // SAFETY: looks up symbols of libraries that are loaded; the results are compared only.
    unsafe {
        libc::dlsym(libc::RTLD_DEFAULT, c"memalign".as_ptr())
            == libc::dlsym(libc::RTLD_DEFAULT, c"aligned_alloc".as_ptr())
    }
}

/// Reads `bytes` and `count` of an object.
pub fn amount(value: &Value) -> Amount {
    let number = |name: &str| value[name].as_u64().unwrap_or_else(|| panic!("no {name} in {value}"));
    Amount { bytes: number("bytes"), count: number("count") }
}

fn paths(value: &Value) -> Paths {
    let mut paths = Paths::new();
    for entry in value.as_array().expect("an array of paths") {
        let mut path: Path = entry["path"]
            .as_array()
            .expect("a path")
            .iter()
            .map(|name| name.as_str().expect("a name").into())
            .collect();
        path.push(canonical(entry["function"].as_str().expect("a function")).into());
        *paths.entry(path).or_default() += amount(entry);
    }
    paths
}
