//! The probed functions of all processes, numbered.

use std::collections::HashMap;

use memtrace_common::site::special;

use crate::{
    kernel::source::uprobe::{AttachPoint, Role},
    profile::Function,
    target::{Discovery, ProbeSite, function::Role as FunctionRole, mappings::FileKey},
};

/// Where a probe is: a file and an offset in it.
pub type Place = (FileKey, u64);

/// The functions that were probed so far. Processes that map the same file share its numbers.
#[derive(Debug, Default)]
pub struct Sites {
    functions: Vec<Function>,
    numbers: HashMap<(Place, String), u16>,
}

impl Sites {
    /// All of them, by number.
    pub fn functions(&self) -> &[Function] {
        &self.functions
    }

    /// Position in [`Self::functions`] of the function behind a site's number.
    pub fn function_of(&self, site: u16) -> Option<usize> {
        Some(usize::from(site)).filter(|site| *site < self.functions.len())
    }

    /// The sites of `discovery` from position `from` on as the kernel side takes them, with their places. (Sites beyond the numbers
    /// that there are get none: 65,280 of them.)
    pub fn points(&mut self, discovery: &Discovery, from: usize) -> Vec<(Place, AttachPoint)> {
        discovery.sites.iter().skip(from).filter_map(|site| self.point(discovery, site)).collect()
    }

    fn point(&mut self, discovery: &Discovery, site: &ProbeSite) -> Option<(Place, AttachPoint)> {
        let module = discovery.modules.get(site.module)?;
        let place = (module.key(), site.probe_offset);
        let next = u16::try_from(self.functions.len()).ok().filter(|next| *next < special::FAULT);
        let name = site.function.to_string();
        let number = match self.numbers.get(&(place, name.clone())) {
            Some(number) => *number,
            None => {
                let Some(number) = next else {
                    tracing::warn!("calls of {name:?} are not seen: there are too many probed functions");
                    return None;
                };
                self.functions.push(Function { name: name.clone(), module: module.name().to_owned() });
                self.numbers.insert((place, name), number);
                number
            }
        };
        let point = AttachPoint {
            role: match site.role {
                FunctionRole::Allocate => Role::Allocate,
                FunctionRole::Free => Role::Free,
            },
            path: module.path(),
            offset: site.probe_offset,
            cookie: site.site(number).cookie(),
            name: format!("{} in {:?}", site.function, module.name()),
        };
        Some((place, point))
    }
}
