#include "tests/lib/client_remote.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/checkpoint/files.h"
#include "client/checkpoint/restore.h"
#include "client/checkpoint/save.h"
#include "client/paths/map.h"
#include "client/session/hub.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "tests/lib/child.h"

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
    EXPECT_OK(try_connect(daemons.address, timeout_ms, &s, &e), &e);
    return s;
}

shd_session *attach_devices(const char *devices)
{
    char address[400];
    struct shd_err e;
    shd_session *s = NULL;
    snprintf(address, sizeof address, "%s?%s", daemons.dir, devices);
    EXPECT_OK(try_connect(address, PATIENT_MS, &s, &e), &e);
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

void poll_until(struct hub *hub, bool (*is_so)(const struct hub *hub))
{
    struct shd_err e;
    while (!is_so(hub))
        EXPECT_OK(hub_poll(hub, 10 * NS_PER_MS, &e), &e);
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

char ckpts[300];

int shell(const char *fmt, ...)
{
    char command[2048];
    va_list args;
    va_start(args, fmt);
    vsnprintf(command, sizeof command, fmt, args);
    va_end(args);
    return system(command);
}

void remove_ckpts(void)
{
    if (ckpts[0] != '\0')
        EXPECT_EQ(shell("rm -rf '%s'", ckpts), 0);
}

void make_ckpts(void)
{
    const char *base = getenv("TMPDIR");
    remove_ckpts();
    snprintf(ckpts, sizeof ckpts, "%s/shd-ckpt-XXXXXX", base != NULL ? base : "/tmp");
    CHECK(mkdtemp(ckpts) != NULL);
}

struct shd_checkpointed save_ok(shd_model *m, uint32_t keep)
{
    struct shd_err e = { 0 };
    struct shd_checkpointed saved = { .size = sizeof saved };
    const struct shd_checkpoint_options options = { .size = sizeof options, .keep = keep };
    EXPECT_OK(shd_checkpoint(m, ckpts, &options, &saved, &e), &e);
    return saved;
}

void train_steps(shd_model *m, uint32_t steps)
{
    struct shd_err e = { 0 };
    for (uint32_t k = 0; k < steps; k++)
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
}

void trainer_run(const char *spec, uint32_t rank, uint32_t workers, uint64_t steps)
{
    shd_session *s;
    shd_model *m;
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    uint32_t micros[TOY_MICROS], count = 0;
    for (uint32_t micro = rank; micro < TOY_MICROS; micro += workers)
        micros[count++] = micro;
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, spec, &m, &e);
    while (r == SHD_OK && shd_step(m) < steps)
        r = toy_step(m, micros, count, &result, &e);
    if (r != SHD_OK)
        fprintf(stderr, "worker %" PRIu32 ": %s\n", rank, e.text);
    else
        shd_close(s);
    _exit(r == SHD_OK ? 0 : 1);
}

pid_t trainer_fork(const char *spec, uint32_t rank, uint32_t workers, uint64_t steps)
{
    const pid_t pid = test_fork();
    if (pid == 0)
        trainer_run(spec, rank, workers, steps);
    return pid;
}

shd_model *restore_ok(shd_session *s, const char *path)
{
    struct shd_err e = { 0 };
    struct shd_restored restored = { .size = sizeof restored };
    shd_model *m;
    EXPECT_OK(shd_restore(s, path, NULL, &restored, &e), &e);
    EXPECT_OK(shd_model_attach(s, restored.model, &m, &e), &e);
    EXPECT_EQ(shd_step(m), restored.step);
    return m;
}

void flip_byte(const char *checkpoint, const char *file, off_t at)
{
    char path[700];
    uint8_t byte;
    snprintf(path, sizeof path, "%s/%s/%s", ckpts, checkpoint, file);
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0);
    if (at < 0)
        at += lseek(fd, 0, SEEK_END);
    CHECK(pread(fd, &byte, 1, at) == 1);
    byte ^= 0x10;
    CHECK(pwrite(fd, &byte, 1, at) == 1);
    close(fd);
}

bool exists(const char *name)
{
    char path[700];
    snprintf(path, sizeof path, "%s/%s", ckpts, name);
    return access(path, F_OK) == 0;
}

void expect_latest(const char *name)
{
    struct shd_err e = { 0 };
    char latest[CHECKPOINT_NAME_BYTES];
    int fd;
    EXPECT_OK(ckpt_open_dir(ckpts, &fd, &e), &e);
    EXPECT_OK(checkpoint_dir_latest(fd, latest, &e), &e);
    close(fd);
    EXPECT_STR(latest, name);
}

uint32_t expect_all_good(void)
{
    struct shd_err e = { 0 };
    struct checkpoint_verified verified;
    struct checkpoint_entry *entries;
    uint32_t count;
    char path[700], latest[CHECKPOINT_NAME_BYTES];
    int fd;
    EXPECT_OK(ckpt_open_dir(ckpts, &fd, &e), &e);
    EXPECT_OK(checkpoint_dir_list(fd, &entries, &count, &e), &e);
    for (uint32_t i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/%s", ckpts, entries[i].name);
        EXPECT_OK(checkpoint_verify(path, &verified, &e), &e);
        EXPECT_EQ(verified.step, entries[i].step);
    }
    const int r = count > 0 ? checkpoint_dir_latest(fd, latest, &e) : SHD_ENOENT;
    if (r != SHD_ENOENT) { /* else no saver has come as far yet */
        EXPECT_OK(r, &e);
        EXPECT_OK(checkpoint_verify(ckpts, &verified, &e), &e);
    }
    free(entries);
    close(fd);
    return count;
}

float *array_of(shd_model *m, uint32_t unit, enum shd_array array)
{
    struct shd_err e = { 0 };
    float *values = malloc(shd_unit_elems(m, unit) * sizeof *values);
    EXPECT(values != NULL);
    EXPECT_OK(shd_get(m, unit, array, values, NULL, NULL, &e), &e);
    return values;
}

void train_pt(shd_model *m, uint32_t steps)
{
    struct pt_run run = { .t = { .overflow_step = UINT64_MAX } };
    struct shd_err e = { 0 };
    for (uint32_t k = 0; k < steps; k++)
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
}

shd_model *open_pt_of(shd_session *s, const struct pt_model *model)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, pt_spec(model), &m, &e), &e);
    return m;
}

shd_session *attach_here(void)
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    return s;
}

void expect_twins(shd_model *m, shd_model *twin)
{
    char hex[65], want[65];
    digest_of(m, hex);
    digest_of(twin, want);
    EXPECT_STR(hex, want);
}
