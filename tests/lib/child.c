#include "tests/lib/child.h"

#include <signal.h>
#include <sys/ptrace.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"

pid_t test_fork(void)
{
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
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
