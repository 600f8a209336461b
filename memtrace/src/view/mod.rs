//! Named profiles to plain tables.
