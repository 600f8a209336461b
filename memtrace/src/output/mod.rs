//! Tables to bytes.
