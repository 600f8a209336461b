// A program that has opened all libraries in the directory that the argument names, and looks at the clock all the time:
// what is the longest that it did not get to?

#include <dirent.h>
#include <dlfcn.h>

static void run(int64_t duration) {
    int64_t start = nanoseconds(CLOCK_MONOTONIC), last = start, pause = 0;
    uint64_t looks = 0;
    int64_t used = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    while (last - start < duration) {
        int64_t now = nanoseconds(CLOCK_MONOTONIC);
        if (now - last > pause)
            pause = now - last;
        last = now;
        looks++;
    }
    used = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - used;
    printf("{\"operations\":%llu,\"cpu_ns\":%lld,\"allocations\":0,\"longest_pause_ns\":%lld}\n",
           (unsigned long long)looks, (long long)used, (long long)pause);
}

int main(int count, char **arguments) {
    DIR *directory = count > 1 ? opendir(arguments[1]) : NULL;
    if (!directory)
        abort();
    for (struct dirent *entry; (entry = readdir(directory));) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", arguments[1], entry->d_name);
        if (entry->d_name[0] != '.' && !dlopen(path, RTLD_NOW))
            abort();
    }
    return commands(run);
}
