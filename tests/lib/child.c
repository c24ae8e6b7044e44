#include "tests/lib/child.h"

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/lib/test.h"

pid_t test_fork(void)
{
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

void expect_well(pid_t pid)
{
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        FAIL("process %d: status %#x", (int)pid, (unsigned)status);
}

__attribute__((no_sanitize("address", "undefined"))) bool
same_words(const uint8_t *a, const uint8_t *b, uint64_t bytes)
{
    const uint64_t *x = (const void *)a, *y = (const void *)b;
    uint64_t differ = 0;
    for (uint64_t i = 0; i < bytes / sizeof *x; i++)
        differ |= x[i] ^ y[i];
    return differ == 0;
}

void child_stop(void)
{
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        _exit(NO_PTRACE);
    raise(SIGSTOP);
}

static bool thread_is(pid_t pid, const char *tid, const char *name)
{
    char path[320], line[32] = "";
    snprintf(path, sizeof path, "/proc/%d/task/%s/comm", (int)pid, tid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false; /* it has ended */
    const bool is = fgets(line, sizeof line, f) != NULL && strncmp(line, name, strlen(name)) == 0 &&
                    line[strlen(name)] == '\n';
    fclose(f);
    return is;
}

uint32_t threads_cpus(pid_t pid, const char *name, cpu_set_t *ret_sets, uint32_t max)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *dir = opendir(path);
    CHECK(dir != NULL);
    uint32_t count = 0;
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir))
        if (d->d_name[0] != '.' && count < max && thread_is(pid, d->d_name, name))
            CHECK(sched_getaffinity(atoi(d->d_name), sizeof *ret_sets, &ret_sets[count++]) == 0);
    closedir(dir);
    return count;
}
