// Threads that allocate with malloc, calloc and realloc in many sizes, under 1, 10 and 30 frames of their own, free
// in any order, and hand every eighth block to another thread, which frees it.

enum { THREADS = 4, SLOTS = 1024 };

struct thread {
    pthread_t id;
    uint64_t random, operations, allocations;
    int64_t used, duration;
    void *slots[SLOTS];
};

static struct thread threads[THREADS];
static _Atomic(void *) shared[SLOTS];

static uint64_t next(struct thread *thread) {
    thread->random ^= thread->random << 13;
    thread->random ^= thread->random >> 7;
    thread->random ^= thread->random << 17;
    return thread->random;
}

static inline __attribute__((always_inline)) void operate(struct thread *thread) {
    uint64_t random = next(thread);
    void **slot = &thread->slots[random % SLOTS];
    unsigned kind = random >> 16 & 7;
    // Sizes of every magnitude from 16 bytes to 32 KiB, small ones as often as large ones.
    size_t bytes = ((size_t)16 << (random >> 24 & 15) % 11) + (random >> 32 & 15);
    if (!*slot) {
        *slot = kind < 5 ? malloc(bytes) : kind < 7 ? calloc(1, bytes) : realloc(NULL, bytes);
        if (!*slot)
            abort();
        *(volatile char *)*slot = 1;
        thread->allocations++;
    } else if (kind == 0) {
        free(atomic_exchange(&shared[random >> 40 & (SLOTS - 1)], *slot));
        *slot = NULL;
    } else if (kind < 3) {
        *slot = realloc(*slot, bytes);
        if (!*slot)
            abort();
        thread->allocations++;
    } else {
        free(*slot);
        *slot = NULL;
    }
    thread->operations++;
}

NOINLINE static void descend(struct thread *thread, int more) {
    if (more > 1)
        descend(thread, more - 1);
    else
        operate(thread);
}

static void *body(void *argument) {
    static const int FRAMES[] = {1, 10, 30};
    struct thread *thread = argument;
    int64_t end = nanoseconds(CLOCK_MONOTONIC) + thread->duration;
    int64_t start = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    do {
        for (int i = 0; i < 300; i++)
            descend(thread, FRAMES[i % 3]);
    } while (nanoseconds(CLOCK_MONOTONIC) < end);
    thread->used = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - start;
    return NULL;
}

static void run(int64_t nanoseconds) {
    for (int i = 0; i < THREADS; i++) {
        struct thread *thread = &threads[i];
        thread->duration = nanoseconds;
        thread->random = 88172645463325252ull + i;
        thread->operations = thread->allocations = 0;
        if (pthread_create(&thread->id, NULL, body, thread))
            abort();
    }
    uint64_t operations = 0, allocations = 0;
    int64_t used = 0;
    for (int i = 0; i < THREADS; i++) {
        struct thread *thread = &threads[i];
        pthread_join(thread->id, NULL);
        operations += thread->operations;
        allocations += thread->allocations;
        used += thread->used;
        for (int slot = 0; slot < SLOTS; slot++) {
            free(thread->slots[slot]);
            thread->slots[slot] = NULL;
        }
    }
    for (int slot = 0; slot < SLOTS; slot++)
        free(atomic_exchange(&shared[slot], NULL));
    printf("{\"operations\":%llu,\"cpu_ns\":%lld,\"allocations\":%llu}\n", (unsigned long long)operations,
           (long long)used, (unsigned long long)allocations);
}

int main(void) {
    return commands(run);
}
