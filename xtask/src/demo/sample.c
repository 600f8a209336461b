// A small "server" that leaks in a known way while it allocates and frees a lot.
//
// Two worker threads handle requests from the first moment on. It reads commands and answers each with a line:
//   quiet    stop leaking; answer when no leak is under way any more. The churn goes on.
//   leak N   leak for N seconds, then stop everything, free what the churn holds, and answer with the truth of these
//            N seconds as JSON: for each call path the bytes and blocks that were lost.
// At the end of its input it exits.
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline))

enum leak { HEADER, VALUE, SESSION, INDEX, LOG, PAGE, BUFFER, LEAKS };

// Call paths from the program's or the thread's first function to the allocator function.
static const char *const PATHS[LEAKS] = {
    [HEADER] = "worker;handle_request;parse_header;malloc",
    [VALUE] = "worker;handle_request;cache_insert;copy_value;malloc",
    [SESSION] = "worker;handle_request;open_session;calloc",
    [INDEX] = "worker;handle_request;cache_insert;grow_index;reallocarray",
    [LOG] = "worker;write_log;append;realloc",
    [PAGE] = "main;serve;reload_config;map_page;memalign",
    [BUFFER] = "main;serve;reload_config;map_buffer;posix_memalign",
};

static struct {
    atomic_ullong bytes, blocks;
} truth[LEAKS];

static atomic_int leaking = 1, stopping;
static atomic_int leaks_under_way;

// Keeps the compiler from finding out that a block is lost.
static void *volatile lost;

NOINLINE static void lose(enum leak leak, void *block, size_t bytes) {
    if (!block)
        abort();
    lost = block;
    atomic_fetch_add(&truth[leak].bytes, bytes);
    atomic_fetch_add(&truth[leak].blocks, 1);
}

NOINLINE static void parse_header(unsigned number) {
    size_t bytes = 40 + number % 7 * 16;
    lose(HEADER, malloc(bytes), bytes);
}

NOINLINE static void copy_value(unsigned number) {
    size_t bytes = 200 + number % 1000;
    char *value = malloc(bytes);
    if (value)
        memset(value, 1, bytes);
    lose(VALUE, value, bytes);
}

NOINLINE static void grow_index(unsigned number) {
    size_t count = 1 + number % 5;
    lose(INDEX, reallocarray(NULL, count, 48), count * 48);
}

NOINLINE static void cache_insert(unsigned number) {
    copy_value(number);
    if (number % 3 == 0)
        grow_index(number);
}

NOINLINE static void open_session(void) {
    lose(SESSION, calloc(3, 120), 3 * 120);
}

NOINLINE static void handle_request(unsigned number) {
    parse_header(number);
    if (number % 2)
        cache_insert(number);
    if (number % 10 == 0)
        open_session();
}

// The block moves and grows; what is lost at last was allocated by the last call.
NOINLINE static void append(unsigned number) {
    size_t bytes = 64;
    char *line = realloc(NULL, bytes);
    for (unsigned i = 0; i < number % 4; i++)
        line = realloc(line, bytes *= 2);
    lose(LOG, line, bytes);
}

NOINLINE static void write_log(unsigned number) {
    append(number);
}

NOINLINE static void map_page(void) {
    lose(PAGE, memalign(4096, 8192), 8192);
}

NOINLINE static void map_buffer(void) {
    void *buffer = NULL;
    if (posix_memalign(&buffer, 64, 3000))
        abort();
    lose(BUFFER, buffer, 3000);
}

NOINLINE static void reload_config(void) {
    map_page();
    map_buffer();
}

// Blocks of all ages that are freed sooner or later, a few by another thread than the one that allocated them.
enum { SLOTS = 512 };
static _Atomic(void *) shared[SLOTS];

NOINLINE static void churn(uint32_t *random, void **slots) {
    for (int i = 0; i < 200; i++) {
        *random ^= *random << 13, *random ^= *random >> 17, *random ^= *random << 5;
        void **slot = &slots[*random % SLOTS];
        size_t bytes = 16 + (*random >> 9) % 2000;
        if (*random >> 28 == 0) {
            free(atomic_exchange(&shared[*random % SLOTS], malloc(bytes)));
        } else if (*slot && *random >> 30 == 1) {
            void *grown = realloc(*slot, bytes);
            if (!grown)
                abort();
            *slot = grown;
        } else {
            free(*slot);
            *slot = *random & 64 ? malloc(bytes) : calloc(1, bytes);
        }
    }
}

static void pause_for(long nanoseconds) {
    struct timespec time = {.tv_nsec = nanoseconds};
    nanosleep(&time, NULL);
}

// Whether the caller may leak now; then it calls leak_done afterwards.
static int leak_begin(void) {
    atomic_fetch_add(&leaks_under_way, 1);
    if (atomic_load(&leaking))
        return 1;
    atomic_fetch_sub(&leaks_under_way, 1);
    return 0;
}

static void leak_done(void) {
    atomic_fetch_sub(&leaks_under_way, 1);
}

static void stop_leaking(void) {
    atomic_store(&leaking, 0);
    while (atomic_load(&leaks_under_way))
        pause_for(100000);
}

NOINLINE static void *worker(void *seed) {
    uint32_t random = (uint32_t)(uintptr_t)seed;
    void *slots[SLOTS] = {0};
    for (unsigned number = 0; !atomic_load(&stopping); number++) {
        if (leak_begin()) {
            handle_request(number);
            if (number % 8 == 3)
                write_log(number);
            leak_done();
        }
        churn(&random, slots);
        pause_for(2000000);
    }
    for (int i = 0; i < SLOTS; i++)
        free(slots[i]);
    return NULL;
}

NOINLINE static void serve(int seconds) {
    for (int i = 0; i < seconds * 20; i++) {
        reload_config();
        pause_for(50000000);
    }
}

int main(void) {
    // Standard output without a block of its own, which would be in the trace.
    static char buffer[4096];
    setvbuf(stdout, buffer, _IOLBF, sizeof buffer);

    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, worker, (void *)(i + 12345)))
            abort();
    puts("ready");

    char line[64];
    for (;;) {
        // Not stdio, which allocates a buffer for its input.
        ssize_t length = read(STDIN_FILENO, line, sizeof line - 1);
        if (length <= 0)
            return 0;
        line[length] = 0;
        if (!strncmp(line, "quiet", 5)) {
            stop_leaking();
            puts("quiet");
        } else if (!strncmp(line, "leak ", 5)) {
            memset(truth, 0, sizeof truth);
            atomic_store(&leaking, 1);
            serve(atoi(line + 5));
            stop_leaking();
            atomic_store(&stopping, 1);
            for (int i = 0; i < 2; i++)
                pthread_join(threads[i], NULL);
            for (int i = 0; i < SLOTS; i++)
                free(shared[i]);
            printf("[");
            for (int i = 0; i < LEAKS; i++)
                printf("%s{\"path\":\"%s\",\"bytes\":%llu,\"blocks\":%llu}", i ? "," : "", PATHS[i],
                       atomic_load(&truth[i].bytes), atomic_load(&truth[i].blocks));
            puts("]");
        }
    }
}
