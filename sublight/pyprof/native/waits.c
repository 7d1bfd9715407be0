/* What the system tells of a thread: how long it waited for a core, and what it does now. */
#define _GNU_SOURCE
#include "native.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#define RUNTIME_BYTES (1 << 20) /* of CPython's own data, in which its lock lies */

extern char _PyRuntime[] __attribute__((weak));

/* The file's text, or NULL. It stays open, as `file`: -2 where it was not opened yet, -1 where it cannot be. */
static const char *text_of(long tid, const char *name, int *file, char *text, size_t room) {
    if (*file == -2) {
        snprintf(text, room, "/proc/self/task/%ld/%s", tid, name);
        *file = open(text, O_RDONLY | O_CLOEXEC);
    }
    if (*file < 0) return NULL;
    ssize_t n = pread(*file, text, room - 1, 0);
    if (n <= 0) return NULL;
    text[n] = 0;
    return text;
}

int64_t core_delay(long tid, int *file) {
    char text[128];
    long long ran, waited;
    if (!text_of(tid, "schedstat", file, text, sizeof text)) return -1;
    return sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : -1;
}

int thread_state(long tid, int *file) {
    char text[256];
    long number;
    unsigned long address;
    if (!text_of(tid, "syscall", file, text, sizeof text)) return UNKNOWN;
    if (sscanf(text, "%ld %lx", &number, &address) != 2) return READY; /* "running" */
    uintptr_t base = (uintptr_t)_PyRuntime;
    return base && address >= base && address < base + RUNTIME_BYTES ? LOCK : ELSEWHERE;
}
