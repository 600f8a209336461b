// A tight malloc(64)/free pair loop on one thread, under as many of the program's own frames as the argument says.

static int frames;
static int64_t duration, used;
static uint64_t pairs;

static inline __attribute__((always_inline)) void loop(void) {
    int64_t end = nanoseconds(CLOCK_MONOTONIC) + duration;
    // The processor time of the loop: another program on the same processor does not count.
    int64_t start = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    pairs = 0;
    do {
        for (int i = 0; i < 1000; i++) {
            char *volatile block = malloc(64);
            *block = 1;
            free(block);
        }
        pairs += 1000;
    } while (nanoseconds(CLOCK_MONOTONIC) < end);
    used = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - start;
}

NOINLINE static void descend(int more) {
    if (more > 0)
        descend(more - 1);
    else
        loop();
}

static void run(int64_t nanoseconds) {
    duration = nanoseconds;
    // main, commands, run and the last descend are frames too.
    descend(frames - 4);
    printf("{\"operations\":%llu,\"cpu_ns\":%lld,\"allocations\":%llu}\n", (unsigned long long)pairs,
           (long long)used, (unsigned long long)pairs);
}

int main(int count, char **arguments) {
    frames = count > 1 ? atoi(arguments[1]) : 4;
    return commands(run);
}
