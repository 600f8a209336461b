//! Names for the addresses of a profile.
