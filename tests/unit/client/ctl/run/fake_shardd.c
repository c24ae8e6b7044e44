/* A daemon for tests of its keeper: stores memory with its service manager, says what it was handed
 * back, and fails when told. $FAKE says how, one word:
 *
 *   (none)  three segments; each life counts itself in each of them
 *   never   ends before it is ready
 *   empty   stores nothing
 *   hang    is ready the first time only
 *   silent  does not say each 50 ms that it is well
 *   slow    takes $FAKE_SLOW_S seconds when it is started again, and asks for ten times as many
 *   names   also stores under names that are no names
 *   many    stores more than may be kept
 *   loud    says 300,000 numbered lines of 128 bytes
 *   lost    drops seg1 when it is handed back
 *
 * SIGUSR1: store "late" and die at once, so that the message outlives its sender.
 */
#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "proto/base/check.h"

#define MANY 4100u

static const char *device = "?";

static bool told(const char *word)
{
    const char *fake = getenv("FAKE");
    return fake != NULL && strcmp(fake, word) == 0;
}

static void store(const char *name, int fd)
{
    char text[512];
    snprintf(text, sizeof(text), "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
    CHECK(sd_pid_notify_with_fds(0, 0, text, &fd, 1) > 0);
}

/* A segment that has seen this many lives. */
static int make(uint32_t lives)
{
    const int fd = memfd_create("seg", MFD_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, &lives, sizeof(lives), 0) == (ssize_t)sizeof(lives));
    return fd;
}

static void store_first(void)
{
    char name[32];
    for (unsigned i = 0; i < 3; i++) {
        snprintf(name, sizeof(name), "seg%u", i);
        const int fd = make(1);
        store(name, fd);
        store(name, fd); /* counts once */
        close(fd);
    }
    const int fd = make(1);
    if (told("names")) {
        char longest[300];
        memset(longest, 'n', sizeof(longest));
        longest[256] = '\0';
        store("a:b", fd);
        store("caf\xc3\xa9", fd);
        store(longest, fd);
        store(longest + 1, fd);
    }
    for (unsigned i = 0; i < MANY && told("many"); i++) {
        snprintf(name, sizeof(name), "many%u", i);
        store(name, fd);
    }
    close(fd);
}

static unsigned open_files(void)
{
    unsigned count = 0;
    DIR *dir = opendir("/proc/self/fd");
    CHECK(dir != NULL);
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir))
        count += d->d_name[0] != '.';
    closedir(dir);
    return count - 1; /* that of the directory */
}

/* One line: "adopted 3 of 6 files: seg0=2 seg1=2 seg2=2"; the first eight. */
static void adopt(int count, char **names)
{
    char line[400];
    int used = snprintf(line, sizeof(line), "adopted %d of %u files:", count, open_files());
    for (int i = 0; i < count; i++) {
        const int fd = SD_LISTEN_FDS_START + i;
        uint32_t lives = 0;
        CHECK(pread(fd, &lives, sizeof(lives), 0) == (ssize_t)sizeof(lives));
        lives++;
        CHECK(pwrite(fd, &lives, sizeof(lives), 0) == (ssize_t)sizeof(lives));
        if (i < 8)
            used += snprintf(line + used, sizeof(line) - (size_t)used, " %.20s=%" PRIu32, names[i],
                             lives);
        if (strncmp(names[i], "seg", 3) == 0)
            store(names[i], fd); /* once more: counts once */
    }
    if (told("lost"))
        CHECK(sd_notify(0, "FDSTOREREMOVE=1\nFDNAME=seg1") > 0);
    fprintf(stderr, "%s\n", line);
}

int main(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--device") == 0)
            device = argv[i + 1];
    if (told("never")) {
        fprintf(stderr, "no luck\n");
        return 4;
    }
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGTERM);
    sigaddset(&wanted, SIGUSR1);
    sigprocmask(SIG_BLOCK, &wanted, NULL);
    char **names = NULL;
    const int count = sd_listen_fds_with_names(/* unset_environment= */ 1, &names);
    CHECK(count >= 0);
    if (count > 0)
        adopt(count, names);
    else if (!told("empty"))
        store_first();
    for (int i = 0; i < count; i++)
        free(names[i]);
    free(names);
    CHECK(sd_notify_barrier(0, UINT64_C(10) * 1000 * 1000) > 0);
    if (count > 0 && told("slow")) {
        const char *text = getenv("FAKE_SLOW_S");
        const unsigned slow_s = text != NULL ? (unsigned)strtoul(text, NULL, 10) : 2;
        sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%u\nSTATUS=adopting", slow_s * 10000000);
        sleep(slow_s);
    }
    if (count == 0 || !told("hang"))
        sd_notify(0, "STATUS=serving\nREADY=1");
    for (unsigned i = 0; i < 300000 && told("loud"); i++) {
        fprintf(stderr, "line %08u %112s\n", i, "");
        if (i % 1000 == 0)
            sd_notify(0, "WATCHDOG=1");
    }
    const struct timespec feed = { .tv_nsec = 50 * 1000 * 1000 };
    int signum = 0;
    while (!told("silent") && (signum = sigtimedwait(&wanted, NULL, &feed)) < 0)
        sd_notify(0, "WATCHDOG=1");
    if (signum == 0)
        sigwait(&wanted, &signum);
    if (signum == SIGUSR1) {
        const int fd = make(100);
        store("late", fd);
        raise(SIGKILL);
    }
    sd_notify(0, "STOPPING=1");
    return 0;
}
