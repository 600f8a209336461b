//! Tests of several processes in one profile.
