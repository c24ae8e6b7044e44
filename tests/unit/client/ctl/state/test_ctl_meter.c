/* How far a save or a restore is: what is counted, and the lines on a terminal and elsewhere. */
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/ctl/state/meter.h"
#include "tests/lib/test.h"

#define GIB 0x1p30

TEST(daemons_are_counted_together_and_who_is_through_stays)
{
    struct doc_model models[2] = { { .written = NAN, .to_write = NAN },
                                   { .written = 1 * GIB, .to_write = 4 * GIB } };
    struct doc doc = { .models = models, .model_count = 2, .read = 3, .to_read = 12 };
    struct meter_part parts[2] = { { 0, 0 }, { 0, 0 } };
    struct meter_count c = { .begun_s = NAN };
    const struct meter_ask text = { METER_CHECKPOINT, NULL, false };
    const struct meter_ask json = { METER_CHECKPOINT, NULL, true };
    char line[200];
    EXPECT(!meter_sum(&c, parts, 2, 10));
    meter_take(&parts[0], METER_CHECKPOINT, &doc);
    meter_take(&parts[1], METER_CHECKPOINT, &doc);
    EXPECT(meter_sum(&c, parts, 2, 10));
    models[1].written = 3 * GIB;
    meter_take(&parts[0], METER_CHECKPOINT, &doc);
    meter_take(&parts[1], METER_CHECKPOINT, NULL); /* it does not answer */
    EXPECT(meter_sum(&c, parts, 2, 12));
    meter_text(&c, &text, 12, line, sizeof line);
    EXPECT_STR(line, "checkpoint: 4.0 GiB of 8.0 GiB (50 %), 1.0 GiB/s, 4 s left");
    meter_text(&c, &json, 12, line, sizeof line);
    EXPECT_STR(line, "{\"progress\":\"checkpoint\",\"bytes\":4294967296,"
                     "\"bytes_total\":8589934592,\"bytes_per_s\":1073741824}");
    models[1].written = models[1].to_write = NAN; /* the first one is through */
    meter_take(&parts[0], METER_CHECKPOINT, &doc);
    EXPECT(meter_sum(&c, parts, 2, 13));
    EXPECT_EQ((uint64_t)c.done, (uint64_t)(5 * GIB));
    meter_take(&parts[1], METER_RESTORE, &doc);
    EXPECT_EQ((uint64_t)parts[1].done, 3);
    EXPECT_EQ((uint64_t)parts[1].all, 12);
}

/* -- With a daemon's status socket --------------------------------------------------------------
 */

#define TEMPLATE "/tmp/shd-progress-XXXXXX"

static char dir[] = TEMPLATE;
static char path[sizeof dir + 16];
static int listener;

/* Each question finds a quarter more done. */
static void *serve(void *arg)
{
    char request[4096], body[200], answer[400];
    (void)arg;
    for (int asked = 0;; asked++) {
        const int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            return NULL;
        const ssize_t got = read(fd, request, sizeof request);
        snprintf(body, sizeof body,
                 "{\"schema\":2,\"device\":\"cpu0\",\"models\":[],"
                 "\"restore\":{\"bytes_done\":%d,\"bytes_total\":4096}}",
                 asked < 4 ? 1024 * asked : 4095);
        snprintf(answer, sizeof answer,
                 "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s",
                 strlen(body), body);
        EXPECT(got > 0 && write(fd, answer, strlen(answer)) == (ssize_t)strlen(answer));
        close(fd);
    }
}

/* stderr goes to `to` while something is restored; what came of it from `from` until it has text.
 */
static void watch(int from, int to, bool json, const char *text)
{
    const struct meter_ask ask = { METER_RESTORE, dir, json };
    char got[4096] = "";
    size_t used = 0;
    pthread_t server;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(dir, sizeof dir, "%s", TEMPLATE);
    EXPECT(mkdtemp(dir) != NULL);
    snprintf(path, sizeof path, "%s/cpu0.status", dir);
    memcpy(address.sun_path, path, strlen(path) + 1);
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 &&
           listen(listener, 8) == 0);
    EXPECT(pthread_create(&server, NULL, serve, NULL) == 0);

    const int before = dup(STDERR_FILENO);
    dup2(to, STDERR_FILENO);
    struct meter *p = meter_begin(&ask);
    while (p != NULL && strstr(got, text) == NULL && used < sizeof got - 1) {
        const ssize_t bytes = read(from, got + used, sizeof got - 1 - used);
        if (bytes <= 0)
            break;
        used += (size_t)bytes;
        got[used] = '\0';
    }
    meter_end(p);
    dup2(before, STDERR_FILENO);
    close(before);
    shutdown(listener, SHUT_RDWR);
    pthread_join(server, NULL);
    close(listener);
    unlink(path);
    rmdir(dir);
    EXPECT(p != NULL);
    EXPECT_HAS(got, text);
}

TEST(a_terminal_has_one_line_that_is_drawn_again)
{
    const int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0)
        SKIP("no pseudo-terminals here");
    const int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    EXPECT(slave >= 0);
    setenv("TERM", "xterm", 1);
    watch(master, slave, false, "\r\033[Krestore: 3.0 KiB of 4.0 KiB (75 %), ");
    close(slave);
    close(master);
}

TEST(elsewhere_there_is_a_line_now_and_then)
{
    int ends[2];
    EXPECT(pipe(ends) == 0);
    watch(ends[0], ends[1], true, "{\"progress\":\"restore\",\"bytes\":");
    close(ends[0]);
    close(ends[1]);
}

TEST_MAIN()
