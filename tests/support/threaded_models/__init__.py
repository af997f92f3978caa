"""Models of SGLang that copy weights on a thread pool; SGLANG_EXTERNAL_MODEL_PACKAGE names this package to a server."""
