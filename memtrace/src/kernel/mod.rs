//! Can this kernel do it; load; attach. The only place that names aya.
