"""SGLang models that load weights in threads. SGLANG_EXTERNAL_MODEL_PACKAGE names this package for a server."""
