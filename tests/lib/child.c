#include "tests/lib/child.h"

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
