#include "tests/lib/paired.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/files/arbiter.h"
#include "proto/files/replicas.h"

char paired_dir[300];

static void arbiter_text(char text[320])
{
    snprintf(text, 320, "file:%s", paired_dir);
}

void paired_make(const struct fixture *f, int hosts, int devices)
{
    char text[320], name[FIXTURE_DEVICE_BYTES];
    struct shd_err e;
    struct replicas_host all[PAIRED_HOSTS_MAX] = { { .name = "a" },
                                                   { .name = "b" },
                                                   { .name = "c" } };
    const struct replicas r = { .arbiter = text,
                                .cluster = "c0",
                                .hosts = all,
                                .host_count = (uint32_t)hosts,
                                .device_count = (uint32_t)(hosts * devices) };
    CHECK(hosts <= PAIRED_HOSTS_MAX);
    for (int i = 0; i < hosts * devices; i++) {
        char *list = all[i / devices].devices;
        const size_t used = strlen(list);
        snprintf(list + used, sizeof all[0].devices - used, "%s%s", used > 0 ? "," : "",
                 fixture_device(f, i, name));
    }
    snprintf(paired_dir, sizeof paired_dir, "%s/arbiter", f->dir);
    arbiter_text(text);
    EXPECT_EQ(mkdir(paired_dir, 0700), 0);
    EXPECT_OK(replicas_write(f->dir, &r, &e), &e);
}

void paired_start(struct fixture *f, int count, int hosts, const char *fail)
{
    f->replicas = FIXTURE_ALONE;
    if (fail == NULL)
        fixture_start(f, count, NULL);
    else
        fixture_start_kept(f, count, fail);
    f->replicas = FIXTURE_AS_TOLD;
    paired_make(f, hosts, 1);
}

uint32_t paired_erase(const struct fixture *f)
{
    char path[400];
    uint32_t views = 0;
    do
        snprintf(path, sizeof path, "%s/c0.%" PRIu32, paired_dir, views + 1);
    while (unlink(path) == 0 && ++views < 100);
    rmdir(paired_dir);
    snprintf(path, sizeof path, "%s/" REPLICAS_FILE, f->dir);
    unlink(path);
    return views;
}

void paired_remove(const struct fixture *f)
{
    EXPECT(paired_erase(f) > 0);
    EXPECT_EQ(access(paired_dir, F_OK), -1); /* nothing else was there */
}

typedef int next_fn(const struct arbiter_view *v, const char *host, struct arbiter_view *ret_next,
                    struct shd_err *e);

/* A busy disk may take longer to write a file than an arbiter is waited for. */
static struct arbiter_view read_view(struct arbiter *arbiter)
{
    struct arbiter_view view;
    struct shd_err e;
    int r;
    do {
        r = arbiter_read(arbiter, &view, &e);
    } while (r == SHD_ETIMEDOUT);
    EXPECT_OK(r, &e);
    return view;
}

static void claim(next_fn *make_next, const char *host)
{
    struct arbiter *arbiter;
    struct arbiter_view next = { 0 };
    char text[320];
    struct shd_err e;
    arbiter_text(text);
    EXPECT_OK(arbiter_open(text, "c0", &arbiter, &e), &e);
    struct arbiter_view view = read_view(arbiter);
    EXPECT_OK(make_next(&view, host, &next, &e), &e);
    const int r = arbiter_claim(arbiter, &next, &e);
    if (r != SHD_ETIMEDOUT)
        EXPECT_OK(r, &e);
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (view.number < next.number) { /* where nobody waited for it, it is made all the same */
        EXPECT(test_now_ms() < end_ms);
        arbiter_view_free(&view);
        view = read_view(arbiter);
    }
    arbiter_view_free(&view);
    arbiter_view_free(&next);
    arbiter_close(arbiter);
}

void paired_put_out(const char *host)
{
    claim(arbiter_view_next, host);
}

void paired_take_in(const char *host)
{
    claim(arbiter_view_in, host);
}

void paired_fill(const char *host)
{
    claim(arbiter_view_filled, host);
}
