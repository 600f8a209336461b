// Two threads that together allocate as many blocks a second as the argument says, each freed 4,096 blocks later. One
// that falls behind catches up.

enum { THREADS = 2, RING = 4096 };

struct thread {
    pthread_t id;
    uint64_t allocations;
    int64_t used, duration;
    void *ring[RING];
};

static struct thread threads[THREADS];
static pthread_barrier_t begin, end;
static double rate;

NOINLINE static void *create(uint64_t number) {
    return malloc(16 + number % 500);
}

static void work(struct thread *thread) {
    int64_t start = nanoseconds(CLOCK_MONOTONIC), elapsed = 0;
    int64_t used = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    thread->allocations = 0;
    while (elapsed < thread->duration) {
        uint64_t due = (uint64_t)(elapsed * 1e-9 * rate / THREADS);
        while (thread->allocations < due) {
            void **slot = &thread->ring[thread->allocations % RING];
            free(*slot);
            *slot = create(thread->allocations++);
        }
        struct timespec pause = {.tv_nsec = 1000000};
        nanosleep(&pause, NULL);
        elapsed = nanoseconds(CLOCK_MONOTONIC) - start;
    }
    thread->used = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - used;
    for (int slot = 0; slot < RING; slot++) {
        free(thread->ring[slot]);
        thread->ring[slot] = NULL;
    }
}

NOINLINE static void *body(void *thread) {
    for (;;) {
        pthread_barrier_wait(&begin);
        work(thread);
        pthread_barrier_wait(&end);
    }
    return NULL;
}

static void run(int64_t duration) {
    for (int i = 0; i < THREADS; i++)
        threads[i].duration = duration;
    pthread_barrier_wait(&begin);
    pthread_barrier_wait(&end);
    uint64_t allocations = 0;
    int64_t used = 0;
    for (int i = 0; i < THREADS; i++) {
        allocations += threads[i].allocations;
        used += threads[i].used;
    }
    printf("{\"operations\":%llu,\"cpu_ns\":%lld,\"allocations\":%llu}\n", (unsigned long long)allocations,
           (long long)used, (unsigned long long)allocations);
}

int main(int count, char **arguments) {
    rate = count > 1 ? atof(arguments[1]) : 300000;
    pthread_barrier_init(&begin, NULL, THREADS + 1);
    pthread_barrier_init(&end, NULL, THREADS + 1);
    // The threads start before tracing does: the C library allocates for each of them.
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i].id, NULL, body, &threads[i]))
            abort();
    return commands(run);
}
