"""Models of SGLang that copy weights on a thread pool. A server finds this package by SGLANG_EXTERNAL_MODEL_PACKAGE."""
