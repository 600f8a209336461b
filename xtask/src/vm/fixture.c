// A program with a known truth, traced in the emulated machine. It says "ready", reads a command and answers with a line:
//   paths    go      allocates by many call paths, from two threads; answers with what each path allocated and what of
//                    it was not freed, as JSON
//   busy     count   how many blocks two threads have allocated, filled, checked and freed so far; they go on
//   (either) the end of its input: it ends, with status 0 if all was right
#define _GNU_SOURCE
#include <alloca.h>
#include <malloc.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A frame of its own under its own name.
#define FRAME __attribute__((noipa))

enum path {
    MALLOC, CALLOC, REALLOC, GROWN, REALLOCARRAY, MEMALIGN, POSIX, DEEP, ALLOCA, LARGE, THREAD, SWAPPED, CHURN,
    PATHS
};

#define RECURSIONS 30
#define DESCEND "descend;descend;descend;descend;descend;descend;descend;descend;descend;descend;"

static const char *const NAMES[PATHS] = {
    [MALLOC] = "main;run;simple;malloc",
    [CALLOC] = "main;run;simple;calloc",
    [REALLOC] = "main;run;resize;realloc",
    [GROWN] = "main;run;resize;malloc",
    [REALLOCARRAY] = "main;run;resize;reallocarray",
    [MEMALIGN] = "main;run;align;memalign",
    [POSIX] = "main;run;align;posix_memalign",
    [DEEP] = "main;run;" DESCEND DESCEND DESCEND "malloc",
    [ALLOCA] = "main;run;with_alloca;leaf;malloc",
    [LARGE] = "main;run;with_large_frame;leaf;malloc",
    [THREAD] = "worker;in_thread;leaf;malloc",
    [SWAPPED] = "worker;in_thread;swap;calloc",
    [CHURN] = "main;run;churn;malloc",
};

static struct {
    atomic_ullong allocated, unfreed;
} truth[PATHS];

static void *volatile lost;

FRAME static void *leaf(enum path path, size_t bytes) {
    void *block = malloc(bytes);
    truth[path].allocated += bytes;
    truth[path].unfreed += bytes;
    return block;
}

static void got(enum path path, void *block, size_t bytes) {
    if (!block)
        abort();
    lost = block;
    truth[path].allocated += bytes;
    truth[path].unfreed += bytes;
}

static void gone(enum path path, size_t bytes) {
    truth[path].unfreed -= bytes;
}

FRAME static void simple(unsigned i) {
    size_t bytes = 1 + i % 500;
    got(MALLOC, malloc(bytes), bytes);
    got(CALLOC, calloc(3, bytes), 3 * bytes);
    free(lost);
    gone(CALLOC, 3 * bytes);
}

FRAME static void resize(unsigned i) {
    void *block = malloc(10);
    got(GROWN, block, 10);
    size_t bytes = 100 + i;
    block = realloc(block, bytes);
    gone(GROWN, 10);
    got(REALLOC, block, bytes);
    if (i % 2) {
        block = reallocarray(block, 7, bytes);
        gone(REALLOC, bytes);
        got(REALLOCARRAY, block, 7 * bytes);
    }
    if (i % 3 == 0) {
        free(block);
        gone(i % 2 ? REALLOCARRAY : REALLOC, i % 2 ? 7 * bytes : bytes);
    }
}

FRAME static void align(unsigned i) {
    got(MEMALIGN, memalign(64, 10 + i), 10 + i);
    void *block = NULL;
    if (posix_memalign(&block, 4096, 33))
        abort();
    got(POSIX, block, 33);
    free(block);
    gone(POSIX, 33);
}

FRAME static void *descend(unsigned depth) {
    if (depth > 1) {
        void *block = descend(depth - 1);
        lost = block;
        return block;
    }
    void *block = malloc(77);
    got(DEEP, block, 77);
    return block;
}

// The frame's size is not known when it is compiled, so that it is found from the frame pointer register.
FRAME static void with_alloca(unsigned i) {
    char *room = alloca(16 + i * 8);
    memset(room, 1, 16 + i * 8);
    lost = room;
    got(ALLOCA, leaf(ALLOCA, 40), 0);
}

FRAME static void with_large_frame(void) {
    char room[400000];
    lost = room;
    room[0] = room[sizeof room - 1] = 1;
    got(LARGE, leaf(LARGE, 50), 0);
}

FRAME static void churn(void) {
    for (unsigned i = 0; i < 500; i++) {
        void *block = malloc(24 + i);
        got(CHURN, block, 24 + i);
        free(block);
        gone(CHURN, 24 + i);
    }
}

static sem_t begin, end;
static void *volatile handed_over;

FRAME static void swap(void) {
    void *block = calloc(1, 99);
    got(SWAPPED, block, 99);
    handed_over = block;
}

FRAME static void in_thread(void) {
    for (unsigned i = 0; i < 100; i++)
        lost = leaf(THREAD, 60 + i);
    swap();
}

// The marks after the calls keep them from being the last thing that a function does.
FRAME static void *worker(void *argument) {
    sem_wait(&begin);
    in_thread();
    sem_post(&end);
    return argument;
}

FRAME static void run(void) {
    sem_post(&begin);
    for (unsigned i = 0; i < 100; i++) {
        simple(i);
        resize(i);
        align(i);
        with_alloca(i);
        lost = descend(RECURSIONS);
    }
    with_large_frame();
    churn();
    sem_wait(&end);
    // Allocated by the other thread.
    free(handed_over);
    gone(SWAPPED, 99);
}

static atomic_ullong rounds;
static atomic_int stopping, wrong;

FRAME static void *keep_busy(void *argument) {
    enum { BLOCKS = 64 };
    unsigned char *blocks[BLOCKS] = {0};
    size_t sizes[BLOCKS] = {0};
    unsigned number = (unsigned)(size_t)argument;
    while (!stopping) {
        number = number * 1103515245 + 12345;
        unsigned at = number >> 16 & (BLOCKS - 1);
        for (size_t i = 0; i < sizes[at]; i += 16)
            if (blocks[at][i] != (unsigned char)at)
                wrong = 1;
        free(blocks[at]);
        sizes[at] = 1 + (number >> 8 & 1023);
        blocks[at] = malloc(sizes[at]);
        if (!blocks[at])
            abort();
        memset(blocks[at], (int)at, sizes[at]);
        rounds++;
    }
    for (unsigned at = 0; at < BLOCKS; at++)
        free(blocks[at]);
    return NULL;
}

static void answer(void) {
    printf("[");
    for (unsigned path = 0; path < PATHS; path++)
        printf("%s{\"path\":\"%s\",\"allocated\":%llu,\"unfreed\":%llu}", path ? "," : "", NAMES[path],
               truth[path].allocated, truth[path].unfreed);
    printf("]\n");
}

int main(int count, char **arguments) {
    static char input[4096], output[16384], line[64];
    setvbuf(stdin, input, _IOFBF, sizeof input);
    setvbuf(stdout, output, _IOFBF, sizeof output);
    int busy = count > 1 && !strcmp(arguments[1], "busy");
    pthread_t threads[2];
    // A new thread's memory is allocated too: they are all there before the trace begins.
    for (size_t i = 0; i < (busy ? 2 : 1); i++)
        if (pthread_create(&threads[i], NULL, busy ? keep_busy : worker, (void *)(i + 1)))
            return 2;
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (!strcmp(line, "go\n")) {
            run();
            answer();
        } else {
            printf("%llu\n", (unsigned long long)rounds);
        }
        fflush(stdout);
    }
    stopping = 1;
    for (size_t i = 0; i < (busy ? 2 : 1); i++)
        pthread_join(threads[i], NULL);
    return wrong;
}
