// Touches fresh pages from a few calls deep, gives them back, and touches them again. Only the touching is timed.

#include <sys/mman.h>
#include <sys/resource.h>

#define PAGES 16384
#define BYTES 4096

static int64_t used(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000000ll +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000ll;
}

NOINLINE static void touch(volatile char *memory) {
    for (long page = 0; page < PAGES; page++)
        memory[page * BYTES] = 1;
}

NOINLINE static void load(volatile char *memory) {
    touch(memory);
    __asm__ volatile("");
}

NOINLINE static void serve(volatile char *memory) {
    load(memory);
    __asm__ volatile("");
}

static void run(int64_t duration) {
    static char *memory;
    if (!memory)
        memory = mmap(NULL, (size_t)PAGES * BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    int64_t start = nanoseconds(CLOCK_MONOTONIC), cpu = 0;
    uint64_t faults = 0;
    while (nanoseconds(CLOCK_MONOTONIC) - start < duration) {
        int64_t before = used();
        serve(memory);
        cpu += used() - before;
        faults += PAGES;
        madvise(memory, (size_t)PAGES * BYTES, MADV_DONTNEED);
    }
    printf("{\"operations\":%llu,\"cpu_ns\":%lld,\"allocations\":0}\n", (unsigned long long)faults, (long long)cpu);
}

int main(void) {
    return commands(run);
}
