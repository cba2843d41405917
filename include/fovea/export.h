#pragma once

// Symbols are hidden by default; FOVEA_API marks what the shared library exports.
#if defined(_WIN32)
#define FOVEA_API
#else
#define FOVEA_API __attribute__((visibility("default")))
#endif
