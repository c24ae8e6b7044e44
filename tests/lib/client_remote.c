#include "tests/lib/client_remote.h"

#include <sys/wait.h>

#include "client/paths/map.h"
#include "proto/base/sys.h"

struct fixture daemons;

int try_connect(const char *address, uint64_t timeout_ms, shd_session **ret, struct shd_err *e)
{
    const struct shd_options options = {
        .size = sizeof options, .address = address, .name = "test", .timeout_ms = timeout_ms
    };
    *e = (struct shd_err){ 0 };
    return shd_connect(&options, ret, e);
}

shd_session *attach(uint64_t timeout_ms)
{
    struct shd_err e;
    shd_session *s;
    EXPECT_OK(try_connect(daemons.dir, timeout_ms, &s, &e), &e);
    return s;
}

shd_model *open_toy(shd_session *s, const char *spec)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    return m;
}

void digest_of(shd_model *m, char hex[65])
{
    struct shd_err e = { 0 };
    uint64_t step;
    EXPECT_OK(shd_digest(m, hex, &step, &e), &e);
    EXPECT_EQ(step, shd_step(m));
}

void remove_dead_fixture(void)
{
    char command[300];
    for (int i = 0; i < daemons.count; i++) {
        kill(daemons.pids[i], SIGKILL);
        waitpid(daemons.pids[i], NULL, 0);
    }
    snprintf(command, sizeof command, "rm -rf %s", daemons.dir);
    EXPECT_EQ(system(command), 0);
}
