// Regions of known content; see tests.rs.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define HUGE (2UL << 20)
#define POPULATE_READ 22

static FILE *truth;

static void check(int failed, const char *what) {
    if (failed) {
        perror(what);
        exit(1);
    }
}

static void say(const char *name, char *start, size_t length, long anon, long file, long shmem) {
    fprintf(truth, "%s %lu %lu %ld %ld %ld\n", name, (unsigned long)start, (unsigned long)length, anon, file, shmem);
}

// Between pages without access, so that it is not merged with others.
static char *map(size_t pages, int flags, int file) {
    char *around = mmap(NULL, (pages + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(around == MAP_FAILED, "mmap");
    char *start = mmap(around + PAGE, pages * PAGE, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, 0);
    check(start == MAP_FAILED, "mmap");
    return start;
}

static char *anonymous(size_t pages) {
    return map(pages, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
}

static void touch(char *start, size_t first, size_t pages) {
    for (size_t page = first; page < first + pages; page++)
        start[page * PAGE] = 1;
}

static int sum(char *start, size_t pages) {
    int sum = 0;
    for (size_t page = 0; page < pages; page++)
        sum += ((volatile char *)start)[page * PAGE];
    return sum;
}

static char *stack_area;
static pthread_barrier_t touched;

static void *thread(void *unused) {
    (void)unused;
    // The thread's own stack is not this, of which only the page at the top is known to be used.
    touch(stack_area, 8, 4);
    say("thread-stack", stack_area, 12 * PAGE, 4, 0, 0);
    pthread_barrier_wait(&touched);
    for (;;)
        pause();
}

static void small(const char *data) {
    char *region = anonymous(100);
    madvise(region, 100 * PAGE, MADV_NOHUGEPAGE);
    touch(region, 10, 50);
    say("written", region, 100 * PAGE, 50, 0, 0);

    region = anonymous(64);
    madvise(region, 64 * PAGE, MADV_NOHUGEPAGE);
    sum(region, 64);
    say("read", region, 64 * PAGE, 0, 0, 0);

    region = anonymous(64);
    sum(region, 64);
    touch(region, 3, 7);
    say("read-then-written", region, 64 * PAGE, 7, 0, 0);

    region = anonymous(4 * 512);
    char *huge = (char *)(((unsigned long)region + HUGE - 1) / HUGE * HUGE);
    madvise(huge, 2 * HUGE, MADV_HUGEPAGE);
    touch(huge, 0, 2 * 512);
    say("huge", huge, 2 * HUGE, 1024, 0, 0);

    region = anonymous(4 * 512);
    huge = (char *)(((unsigned long)region + HUGE - 1) / HUGE * HUGE);
    madvise(huge, 2 * HUGE, MADV_HUGEPAGE);
    sum(huge, 1);
    say("huge-zero", huge, HUGE, 0, 0, 0);

    int file = open(data, O_RDWR | O_CREAT, 0600);
    check(file < 0 || ftruncate(file, 64 * PAGE) != 0, "data file");
    char page[PAGE];
    memset(page, 1, sizeof page);
    for (int i = 0; i < 64; i++)
        check(write(file, page, PAGE) != (ssize_t)PAGE, "write");
    region = map(64, MAP_PRIVATE, file);
    check(madvise(region, 48 * PAGE, POPULATE_READ) != 0, "populate");
    touch(region, 5, 9);
    say("private-file", region, 48 * PAGE, 9, 39, 0);
    region = map(64, MAP_SHARED, file);
    check(madvise(region, 64 * PAGE, POPULATE_READ) != 0, "populate");
    touch(region, 5, 9);
    say("shared-file", region, 64 * PAGE, 0, 64, 0);

    int memory = memfd_create("[heap]", 0);
    check(memory < 0 || ftruncate(memory, 64 * PAGE) != 0, "memfd");
    region = map(64, MAP_SHARED, memory);
    touch(region, 0, 30);
    say("memfd", region, 64 * PAGE, 0, 0, 30);
    region = map(64, MAP_PRIVATE, memory);
    check(madvise(region, 20 * PAGE, POPULATE_READ) != 0, "populate");
    touch(region, 18, 5);
    say("memfd-private", region, 20 * PAGE, 2, 0, 18);

    int id = shmget(IPC_PRIVATE, 32 * PAGE, IPC_CREAT | 0600);
    check(id < 0, "shmget");
    region = shmat(id, NULL, 0);
    check(region == (char *)-1, "shmat");
    shmctl(id, IPC_RMID, NULL);
    touch(region, 4, 11);
    say("system-v", region, 32 * PAGE, 0, 0, 11);

    region = map(32, MAP_SHARED | MAP_ANONYMOUS, -1);
    touch(region, 4, 13);
    say("shared-anonymous", region, 32 * PAGE, 0, 0, 13);

    region = anonymous(64);
    touch(region, 0, 64);
    madvise(region + 16 * PAGE, 20 * PAGE, MADV_DONTNEED);
    say("given-back", region, 64 * PAGE, 44, 0, 0);

    // How much of it goes is the kernel's business: nothing where there is no swap.
    region = anonymous(64);
    touch(region, 0, 64);
    madvise(region, 64 * PAGE, 21); // MADV_PAGEOUT

    // Maps the page of [vvar], which no kernel counts.
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);

    region = anonymous(64);
    check(mlock(region + 8 * PAGE, 24 * PAGE) != 0, "mlock");
    say("locked", region, 64 * PAGE, 24, 0, 0);

    region = anonymous(64);
    touch(region, 1, 17);
    mprotect(region, 64 * PAGE, PROT_NONE);
    say("no-access", region, 64 * PAGE, 17, 0, 0);

    region = anonymous(64);
    touch(region, 0, 64);
    madvise(region + 8 * PAGE, 8 * PAGE, 102); // MADV_GUARD_INSTALL: Linux 6.15
    char guarded;
    unsigned char resident[64];
    mincore(region, 64 * PAGE, resident);
    guarded = !(resident[8] & 1);
    say("guarded", region, 64 * PAGE, guarded ? 56 : 64, 0, 0);

    stack_area = anonymous(64);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, stack_area + 16 * PAGE, 48 * PAGE);
    pthread_t number;
    pthread_barrier_init(&touched, NULL, 2);
    check(pthread_create(&number, &attributes, thread, NULL), "pthread_create");
    pthread_barrier_wait(&touched);
}

// A GiB of small pages, every other page of 512 MiB, 20 GiB with a page every 64 MiB, and 256 MiB of memory
// mapped eight times.
static void large(void) {
    size_t gibibyte = 1UL << 18;
    char *region = anonymous(gibibyte);
    madvise(region, gibibyte * PAGE, MADV_NOHUGEPAGE);
    touch(region, 0, gibibyte);
    say("dense", region, gibibyte * PAGE, gibibyte, 0, 0);

    size_t half = gibibyte / 2;
    region = anonymous(half);
    madvise(region, half * PAGE, MADV_NOHUGEPAGE);
    for (size_t page = 0; page < half; page += 2)
        region[page * PAGE] = 1;
    say("alternating", region, half * PAGE, half / 2, 0, 0);

    region = anonymous(20 * gibibyte);
    madvise(region, 20 * gibibyte * PAGE, MADV_NOHUGEPAGE);
    for (size_t page = 0; page < 20 * gibibyte; page += gibibyte / 16)
        region[page * PAGE] = 1;
    say("sparse", region, 20 * gibibyte * PAGE, 320, 0, 0);

    int memory = memfd_create("many", 0);
    check(memory < 0 || ftruncate(memory, gibibyte / 4 * PAGE) != 0, "memfd");
    for (int copy = 0; copy < 8; copy++) {
        region = map(gibibyte / 4, MAP_SHARED, memory);
        check(madvise(region, gibibyte / 4 * PAGE, copy ? POPULATE_READ : POPULATE_READ + 1) != 0, "populate");
        char name[32];
        sprintf(name, "many-%d", copy);
        say(name, region, gibibyte / 4 * PAGE, 0, 0, gibibyte / 4);
    }
}

static void hugetlb(void) {
    char *region = mmap(NULL, 4 * HUGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE | 21 << MAP_HUGE_SHIFT, -1, 0);
    check(region == MAP_FAILED, "mmap of huge pages");
    for (int page = 0; page < 3; page++)
        region[page * HUGE] = 1;
    say("hugetlb", region, 4 * HUGE, 0, 0, 0);
}

static void *wait_for_ever(void *unused) {
    for (;;)
        pause();
    return unused;
}

int main(int argc, char **argv) {
    truth = fopen(argv[1], "w");
    check(!truth, "truth");
    setvbuf(truth, malloc(BUFSIZ), _IOFBF, BUFSIZ);
    const char *what = argc > 3 ? argv[3] : "";
    // In every thread, for sigwait below.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    if (!strcmp(what, "hugetlb"))
        hugetlb();
    else if (!strcmp(what, "large"))
        large();
    else if (!strcmp(what, "end-main")) {
        pthread_t number;
        check(pthread_create(&number, NULL, wait_for_ever, NULL), "pthread_create");
    } else
        small(argv[2]);
    fclose(truth);
    puts("ready");
    fflush(stdout);
    if (!strcmp(what, "end-main")) {
        int number;
        sigwait(&signals, &number);
        pthread_exit(NULL);
    }
    for (;;)
        pause();
}
