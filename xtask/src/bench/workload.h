// What the workloads share. Each reads lines "run SECONDS" and answers with one line of JSON.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline))

static int64_t nanoseconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// Calls `run` with the nanoseconds of every command.
static int commands(void (*run)(int64_t)) {
    // Standard output and input without blocks of their own, which would be in the trace.
    static char buffer[1024];
    setvbuf(stdout, buffer, _IOLBF, sizeof buffer);
    puts("ready");
    char line[64];
    for (;;) {
        ssize_t length = read(STDIN_FILENO, line, sizeof line - 1);
        if (length <= 0)
            return 0;
        line[length] = 0;
        if (!strncmp(line, "run ", 4))
            run((int64_t)(atof(line + 4) * 1e9));
    }
}
