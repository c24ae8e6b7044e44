/* See bulk_others.h. */
#include "bench/bulk_others.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>
#include <zmq.h>

#include "bench/bench.h"
#include "proto/base/clock.h"

#define ANSWER_MAX ((size_t)1 << 20)
#define HWM        4 /* messages */

/* -- ZeroMQ ------------------------------------------------------------------------------------ */

struct keys {
    char server[41], server_secret[41], client[41], client_secret[41];
};

bool bulk_has_curve(void)
{
    return zmq_has("curve") != 0;
}

static int zmq_failed(const char *what, struct shd_err *e)
{
    return err_set(e, SHD_EIO, "%s: %s", what, zmq_strerror(zmq_errno()));
}

static bool set_int(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof value) == 0;
}

static bool set_key(void *socket, int option, const char *key)
{
    return zmq_setsockopt(socket, option, key, strlen(key) + 1) == 0;
}

static void keep(void *data, void *hint) /* the ring stays */
{
    (void)data;
    (void)hint;
}

/* Behind an empty message, by which the receiver knows when it begins. */
static int send_frames(const struct bulk_rings *rings, void *socket, struct shd_err *e)
{
    if (zmq_send(socket, "", 0, 0) < 0)
        return zmq_failed("zmq_send", e);
    for (uint64_t sent = 0; sent < rings->bytes; sent += rings->frame_bytes) {
        uint8_t *at = rings->from + bulk_ring_at(rings, sent);
        zmq_msg_t msg;
        if (zmq_msg_init_data(&msg, at, rings->frame_bytes, keep, NULL) != 0 ||
            zmq_msg_send(&msg, socket, 0) < 0)
            return zmq_failed("zmq_msg_send", e);
    }
    return SHD_OK;
}

static int zmq_sender(const struct bulk_rings *rings, const char *endpoint, const struct keys *keys,
                      struct shd_err *e)
{
    void *ctx = zmq_ctx_new();
    void *socket = ctx != NULL ? zmq_socket(ctx, ZMQ_PUSH) : NULL;
    if (socket == NULL || !set_int(socket, ZMQ_SNDHWM, HWM) ||
        (keys != NULL && (!set_key(socket, ZMQ_CURVE_SERVERKEY, keys->server) ||
                          !set_key(socket, ZMQ_CURVE_PUBLICKEY, keys->client) ||
                          !set_key(socket, ZMQ_CURVE_SECRETKEY, keys->client_secret))) ||
        zmq_connect(socket, endpoint) != 0)
        return zmq_failed("a socket to send by", e);
    const double before = bulk_own_cpu_s();
    const int r = send_frames(rings, socket, e);
    zmq_close(socket);
    zmq_ctx_term(ctx); /* once all has gone */
    rings->shared->cpu_s = bulk_own_cpu_s() - before;
    return r;
}

static int receive_frames(struct bulk_received *got, void *socket, struct shd_err *e)
{
    while (got->done < got->rings->bytes) {
        zmq_msg_t msg;
        zmq_msg_init(&msg);
        if (zmq_msg_recv(&msg, socket, 0) < 0)
            return zmq_failed("zmq_msg_recv", e);
        const size_t bytes = zmq_msg_size(&msg);
        bulk_begin(got);
        if (bytes > 0)
            memcpy(got->rings->to + bulk_ring_at(got->rings, got->done), zmq_msg_data(&msg), bytes);
        zmq_msg_close(&msg);
        if (bytes > 0)
            bulk_took(got, bytes);
    }
    return SHD_OK;
}

static int listen_zmq(void *socket, const struct keys *keys, char *endpoint, size_t bytes,
                      struct shd_err *e)
{
    if (socket == NULL || !set_int(socket, ZMQ_RCVHWM, HWM) ||
        !set_int(socket, ZMQ_RCVTIMEO, (int)(BULK_MEET_NS / NS_PER_MS)) ||
        (keys != NULL && (!set_int(socket, ZMQ_CURVE_SERVER, 1) ||
                          !set_key(socket, ZMQ_CURVE_SECRETKEY, keys->server_secret))) ||
        zmq_bind(socket, "tcp://127.0.0.1:*") != 0 ||
        zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, endpoint, &bytes) != 0)
        return zmq_failed("a socket to receive by", e);
    return SHD_OK;
}

static int transfer_zmq(const struct bulk_rings *rings, void *socket, const struct keys *keys,
                        struct bulk_way *way, struct shd_err *e)
{
    struct bulk_received got = { .rings = rings };
    char endpoint[128];
    int status;
    int r = listen_zmq(socket, keys, endpoint, sizeof endpoint, e);
    if (r != SHD_OK)
        return r;
    const pid_t child = fork();
    if (child < 0)
        return err_sys(e, SHD_EIO, "fork");
    if (child == 0) {
        bench_check(zmq_sender(rings, endpoint, keys, e), e);
        _exit(0);
    }
    r = receive_frames(&got, socket, e);
    if (r != SHD_OK)
        kill(child, SIGKILL);
    if (waitpid(child, &status, 0) != child || (r == SHD_OK && status != 0))
        return err_set(e, SHD_EGONE, "the sender ended with status %d", status);
    if (r == SHD_OK)
        bulk_count_transfer(way, &got);
    return r;
}

int bulk_zmq(const struct bulk_rings *rings, bool curve, struct bulk_way *way, struct shd_err *e)
{
    struct keys keys;
    if (curve && (zmq_curve_keypair(keys.server, keys.server_secret) != 0 ||
                  zmq_curve_keypair(keys.client, keys.client_secret) != 0))
        return zmq_failed("zmq_curve_keypair", e);
    void *ctx = zmq_ctx_new();
    void *socket = ctx != NULL ? zmq_socket(ctx, ZMQ_PULL) : NULL;
    const int r = transfer_zmq(rings, socket, curve ? &keys : NULL, way, e);
    if (socket != NULL)
        zmq_close(socket);
    if (ctx != NULL)
        zmq_ctx_term(ctx);
    return r;
}

/* -- Programs ---------------------------------------------------------------------------------- */

static pid_t start(const char *const argv[], int out)
{
    const pid_t child = fork();
    if (child != 0)
        return child;
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    setenv("UCX_TLS", "tcp", 1);
    setenv("UCX_NET_DEVICES", "lo", 1);
    execvp(argv[0], (char *const *)argv);
    _exit(127);
}

static int open_null(void)
{
    return open("/dev/null", O_WRONLY | O_CLOEXEC);
}

bool bulk_has(const char *program, const char *flag)
{
    const char *const argv[] = { program, flag, NULL };
    int status;
    const int null = open_null();
    const pid_t child = start(argv, null);
    close(null);
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) != 127;
}

/* What it says until it closes its end. */
static size_t hear(int fd, char *text, size_t bytes_max)
{
    size_t bytes = 0;
    ssize_t n;
    while (bytes < bytes_max && (n = read(fd, text + bytes, bytes_max - bytes)) > 0)
        bytes += (size_t)n;
    return bytes;
}

/* Once the server listens: until then again. */
static int run_client(const char *const argv[], char answer[ANSWER_MAX], double *ret_cpu_s,
                      struct shd_err *e)
{
    const uint64_t end_ns = clock_now_ns() + BULK_MEET_NS;
    int out[2], status = -1;
    for (;;) {
        struct rusage usage = { 0 };
        if (pipe2(out, O_CLOEXEC) < 0)
            return err_sys(e, SHD_EIO, "pipe");
        const pid_t child = start(argv, out[1]);
        close(out[1]);
        answer[hear(out[0], answer, ANSWER_MAX - 1)] = 0;
        close(out[0]);
        if (child < 0 || wait4(child, &status, 0, &usage) != child)
            return err_sys(e, SHD_EIO, "wait for a program");
        *ret_cpu_s = bulk_cpu_s(&usage);
        if (status == 0 && strstr(answer, "\"error\":") == NULL) /* iperf3 -J ends with 0 */
            return SHD_OK;
        if (clock_now_ns() > end_ns)
            return err_set(e, SHD_EGONE, "%s failed: %.200s", argv[0], answer);
        usleep(20000);
    }
}

/* Both ends' processor time. */
static int run_pair(const char *const server_argv[], const char *const client_argv[],
                    char answer[ANSWER_MAX], double *ret_cpu_s, struct shd_err *e)
{
    struct rusage usage = { 0 };
    int status;
    const int null = open_null();
    const pid_t server = start(server_argv, null);
    close(null);
    if (server < 0)
        return err_sys(e, SHD_EIO, "fork");
    const int r = run_client(client_argv, answer, ret_cpu_s, e);
    if (r != SHD_OK)
        kill(server, SIGKILL);
    if (wait4(server, &status, 0, &usage) != server)
        return err_sys(e, SHD_EIO, "wait for %s", server_argv[0]);
    *ret_cpu_s += bulk_cpu_s(&usage);
    return r;
}

static int rate_of_iperf(const char *text, double *ret_rate, struct shd_err *e)
{
    json_t *root = json_loads(text, 0, NULL);
    const json_t *end = json_object_get(root, "end");
    const double bits = json_number_value(
        json_object_get(json_object_get(end, "sum_received"), "bits_per_second"));
    json_decref(root);
    if (!(bits > 0))
        return err_set(e, SHD_EPROTO, "iperf3 says nothing of its rate: %.100s", text);
    *ret_rate = bits / 8e9;
    return SHD_OK;
}

/* "iterations,...,avg_bw,overall_bw,..." and below it the numbers, in MiB/s. */
static int rate_of_ucx(const char *text, double *ret_rate, struct shd_err *e)
{
    const char *line = strstr(text, "\n");
    double mib = 0;
    if (line == NULL || sscanf(line, " %*f,%*f,%*f,%*f,%*f,%lf,", &mib) != 1 || !(mib > 0))
        return err_set(e, SHD_EPROTO, "ucx_perftest says nothing of its rate: %.100s", text);
    *ret_rate = mib * 0x1p20 * 1e-9;
    return SHD_OK;
}

int bulk_iperf(const struct bulk_rings *rings, const char *port, struct bulk_way *way,
               struct shd_err *e)
{
    static char answer[ANSWER_MAX];
    char bytes[32];
    const char *const server[] = { "iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, NULL };
    const char *const client[] = {
        "iperf3", "-c", "127.0.0.1", "-p", port, "-J", "-n", bytes, NULL
    };
    double rate = 0, cpu_s = 0;
    snprintf(bytes, sizeof bytes, "%" PRIu64, rings->bytes);
    int r = run_pair(server, client, answer, &cpu_s, e);
    if (r == SHD_OK)
        r = rate_of_iperf(answer, &rate, e);
    if (r == SHD_OK)
        bulk_count(way, rate, cpu_s, rings->bytes);
    return r;
}

/* It sends one message more, to warm up by. */
int bulk_ucx(const struct bulk_rings *rings, const char *port, struct bulk_way *way,
             struct shd_err *e)
{
    static char answer[ANSWER_MAX];
    char frame[32], count[32];
    const char *const server[] = { "ucx_perftest", "-p", port, NULL };
    const char *const client[] = { "ucx_perftest", "127.0.0.1", "-t",  "tag_bw", "-s",
                                   frame,          "-n",        count, "-w",     "1",
                                   "-p",           port,        "-f",  "-v",     NULL };
    double rate = 0, cpu_s = 0;
    snprintf(frame, sizeof frame, "%" PRIu64, rings->frame_bytes);
    snprintf(count, sizeof count, "%" PRIu64, rings->bytes / rings->frame_bytes);
    int r = run_pair(server, client, answer, &cpu_s, e);
    if (r == SHD_OK)
        r = rate_of_ucx(answer, &rate, e);
    if (r == SHD_OK)
        bulk_count(way, rate, cpu_s, rings->bytes + rings->frame_bytes);
    return r;
}
