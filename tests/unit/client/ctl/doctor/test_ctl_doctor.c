/* shardctl doctor and completion, by the real binary: what each makes of a host that is in order,
 * and of one thing at a time that is not. Findings are read from --json. */
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

#define SHARDCTL     SHD_BIN_DIR "/shardctl"
#define OUTPUT_BYTES (64u * 1024u)

static char output[OUTPUT_BYTES];

/* Run `shardctl ARGS` with these variables set ("A=1 B=2"), its stdout into output[]; the exit
 * code. */
static int shardctl_with(const char *variables, const char *args)
{
    char command[1400];
    snprintf(command, sizeof command, "%s %s %s 2>/dev/null", variables, SHARDCTL, args);
    fflush(NULL);
    FILE *f = popen(command, "re"); /* NOLINT(cert-env33-c): our own words */
    CHECK(f != NULL);
    const size_t n = fread(output, 1, sizeof output - 1, f);
    output[n] = '\0';
    const int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int shardctl(const char *args)
{
    return shardctl_with("", args);
}

static json_t *findings; /* of the last doctor(), with its root */
static json_t *report;

static int doctor_with(const char *variables, const char *args)
{
    char line[600];
    snprintf(line, sizeof line, "doctor --json %s", args);
    const int code = shardctl_with(variables, line);
    json_decref(report);
    report = json_loads(output, 0, NULL);
    findings = json_object_get(report, "findings");
    EXPECT(json_is_array(findings));
    return code;
}

static int doctor(const char *args)
{
    return doctor_with("", args);
}

/* The first finding of a check whose text has part in it: its level; "" when there is none. */
static const char *level_of(const char *check, const char *part)
{
    size_t i;
    json_t *f;
    json_array_foreach(findings, i, f)
    {
        const char *name = json_string_value(json_object_get(f, "check"));
        const char *found = json_string_value(json_object_get(f, "found"));
        if (strcmp(name, check) == 0 && strstr(found, part) != NULL)
            return json_string_value(json_object_get(f, "level"));
    }
    return "";
}

static void dir_new(char dir[128], const char *name)
{
    snprintf(dir, 128, "%s/shd-doctor-%s-XXXXXX", fixture_base(), name);
    EXPECT(mkdtemp(dir) != NULL);
}

TEST(every_area_is_looked_at)
{
    static const char *const checks[] = { "kernel",  "limits",  "memory",  "cpu",       "gemm",
                                          "systemd", "runtime", "daemons", "leftovers", "gpu" };
    EXPECT_EQ(doctor("--runtime-dir /nonexistent/shardd"), 0);
    for (size_t i = 0; i < ARRAY_SIZE(checks); i++)
        EXPECT(level_of(checks[i], "")[0] != '\0');
    EXPECT_STR(level_of("kernel", "sealed memfd"), "ok");
    EXPECT_STR(level_of("runtime", "no /nonexistent/shardd"), "ok");
    EXPECT_STR(level_of("checkpoint", ""), ""); /* not asked about */
    EXPECT_EQ(json_integer_value(json_object_get(report, "fail")), 0);
    const long long sum = json_integer_value(json_object_get(report, "ok")) +
                          json_integer_value(json_object_get(report, "warn"));
    EXPECT_EQ(sum, json_array_size(findings));
}

/* Each daemon's part of a unit is a mapping of a worker. */
TEST(units_that_a_worker_can_map_are_told)
{
    char want[80];
    unsigned long max = 0;
    FILE *f = fopen("/proc/sys/vm/max_map_count", "re");
    EXPECT(f != NULL && fscanf(f, "%lu", &max) == 1); /* NOLINT(cert-err34-c): the kernel's */
    fclose(f);
    const unsigned long fit = (max - 4096) / 2;
    snprintf(want, sizeof want, "vm.max_map_count %lu: models of %lu units on 2 daemons", max,
             fit < SHD_UNITS_MAX ? fit : SHD_UNITS_MAX);
    EXPECT_EQ(doctor("--runtime-dir /nonexistent/shardd"), 0);
    EXPECT_STR(level_of("limits", want), "ok");
}

TEST(directory_is_where_the_rule_says)
{
    EXPECT_EQ(doctor_with("SHARDD_ADDRESS='/nonexistent/env?cpu0'", ""), 0);
    EXPECT_STR(level_of("runtime", "no /nonexistent/env:"), "ok");
    EXPECT_EQ(doctor_with("SHARDD_ADDRESS=/nonexistent/env", "--address /nonexistent/given"), 0);
    EXPECT_STR(level_of("runtime", "no /nonexistent/given:"), "ok");
    EXPECT_EQ(doctor_with("SHARDD_ADDRESS=local:", ""), 0);
    EXPECT_STR(level_of("runtime", "owners inside a process are no daemons"), "warn");
}

/* As the daemons of dir have met them. */
static unsigned broken_pipes(const char *dir)
{
    char args[200];
    unsigned count = 0;
    snprintf(args, sizeof args, "status --json --address %s", dir);
    EXPECT_EQ(shardctl(args), 0);
    for (const char *at = output; (at = strstr(at, "Broken pipe")) != NULL; at++)
        count++;
    return count;
}

TEST(live_daemon_answers_and_a_killed_ones_socket_is_stale)
{
    struct fixture f = { .count = 0 };
    char args[300], path[300];
    fixture_start(&f, 2, NULL);
    snprintf(args, sizeof args, "--runtime-dir %s", f.dir);
    const unsigned broken = broken_pipes(f.dir);
    EXPECT_EQ(doctor(args), 0);
    EXPECT(strstr(level_of("daemons", "cpu0: pid"), "fail") == NULL);
    EXPECT(level_of("daemons", "cpu0: pid")[0] != '\0');
    EXPECT_EQ(broken_pipes(f.dir), broken); /* looking is no trouble to the daemon */
    EXPECT(level_of("daemons", "cpu1: pid")[0] != '\0');
    EXPECT_STR(level_of("runtime", "2 devices locked"), "ok");

    kill(f.pids[1], SIGKILL);
    EXPECT_EQ(waitpid(f.pids[1], NULL, 0), f.pids[1]);
    EXPECT_EQ(doctor(args), 0);
    EXPECT_STR(level_of("daemons", "cpu1: stale socket"), "warn");
    EXPECT_STR(level_of("runtime", "1 lock file of ended ones"), "ok");

    static const char *const kinds[] = { "sock", "zmq", "lock", "status" };
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        snprintf(path, sizeof path, "%s/cpu1.%s", f.dir, kinds[i]);
        unlink(path);
    }
    f.count = 1;
    fixture_stop(&f);
}

TEST(stopped_daemon_is_a_failure_with_a_deadline)
{
    struct fixture f = { .count = 0 };
    char args[300];
    fixture_start(&f, 1, NULL);
    kill(f.pids[0], SIGSTOP);
    snprintf(args, sizeof args, "--runtime-dir %s", f.dir);
    EXPECT_EQ(doctor(args), 1);
    EXPECT_STR(level_of("daemons", "cpu0"), "fail");
    kill(f.pids[0], SIGCONT);
    fixture_stop(&f);
}

TEST(directory_that_others_can_write_to_is_a_failure)
{
    char dir[128], args[200];
    dir_new(dir, "mode");
    snprintf(args, sizeof args, "--runtime-dir %s", dir);
    static const struct {
        mode_t mode;
        const char *level;
        int code;
    } cases[] = { { 0700, "ok", 0 }, { 0750, "ok", 0 }, { 0770, "warn", 0 }, { 0777, "fail", 1 } };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        EXPECT(chmod(dir, cases[i].mode) == 0);
        EXPECT_EQ(doctor(args), cases[i].code);
        EXPECT_STR(level_of("runtime", dir), cases[i].level);
    }
    rmdir(dir);
}

struct answering { /* a relay's /status, once */
    int fd;
    const char *body;
};

static void *answer_main(void *arg)
{
    const struct answering *a = arg;
    char text[500];
    const int fd = accept4(a->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0 || recv(fd, text, sizeof text, 0) <= 0)
        return NULL;
    const int bytes = snprintf(text, sizeof text,
                               "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n"
                               "Connection: close\r\n\r\n%s",
                               strlen(a->body), a->body);
    send(fd, text, (size_t)bytes, MSG_NOSIGNAL);
    close(fd);
    return NULL;
}

/* Of builds of before and after, too. test_hosts has real ones. */
TEST(relay_is_asked_how_parameters_cross)
{
    static const char *const cases[][3] = {
        { "{\"bulk\": \"tcp, by TLS 1.3\"}", "answers, bulk tcp, by TLS 1.3", "ok" },
        { "{\"bulk\": \"ucx, not encrypted\"}", "answers, bulk ucx, not encrypted", "warn" },
        { "{}", "answers, bulk tcp, by TLS 1.3", "ok" },
        { "{\"bulk\": \"pigeons\"}", "with a bulk not known here", "warn" },
        { "pigeons", "is no JSON", "fail" },
    };
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    char dir[128], args[200];
    dir_new(dir, "relay");
    snprintf(args, sizeof args, "--runtime-dir %s", dir);
    snprintf(at.sun_path, sizeof at.sun_path, "%.90s/relay.status", dir);
    struct answering a = { .fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) };
    EXPECT(bind(a.fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(a.fd, 4) == 0);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        pthread_t thread;
        a.body = cases[i][0];
        CHECK(pthread_create(&thread, NULL, answer_main, &a) == 0);
        const int code = doctor(args);
        pthread_join(thread, NULL);
        EXPECT_STR(level_of("daemons", cases[i][1]), cases[i][2]);
        EXPECT_EQ(code, strcmp(cases[i][2], "fail") == 0);
    }
    close(a.fd);
    EXPECT_EQ(doctor(args), 0); /* nobody is there any more */
    EXPECT_STR(level_of("daemons", "relay: "), "warn");
    unlink(at.sun_path);
    rmdir(dir);
}

TEST(file_in_the_runtime_directorys_place_is_a_failure)
{
    EXPECT_EQ(doctor("--runtime-dir /dev/null"), 1);
    EXPECT_STR(level_of("runtime", "is not a directory"), "fail");
}

TEST(checkpoint_directory_is_tried_and_left_as_it_was)
{
    char dir[128], args[400];
    dir_new(dir, "checkpoint");
    snprintf(args, sizeof args, "--runtime-dir /nonexistent/shardd --checkpoint %s", dir);
    EXPECT_EQ(doctor(args), 0);
    EXPECT(level_of("checkpoint", dir)[0] != '\0');
    EXPECT_EQ(rmdir(dir), 0); /* empty again */
    EXPECT_EQ(doctor(args), 1);
    EXPECT_STR(level_of("checkpoint", "No such file"), "fail");
    EXPECT_EQ(doctor("--runtime-dir /nonexistent/shardd --checkpoint /dev/null"), 1);
    EXPECT_STR(level_of("checkpoint", "not a directory"), "fail");
    EXPECT_EQ(doctor("--runtime-dir /nonexistent/shardd --checkpoint /proc"), 1);
    EXPECT_STR(level_of("checkpoint", "cannot make a file"), "fail");
}

TEST(directory_of_a_killed_run_is_found)
{
    char base[128], run[200], lock[230];
    dir_new(base, "runs");
    snprintf(run, sizeof run, "%s/shardd-run-abc123", base);
    snprintf(lock, sizeof lock, "%s/lock", run);
    EXPECT(mkdir(run, 0700) == 0);
    const int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    EXPECT(fd >= 0);
    close(fd);
    const char *before = getenv("XDG_RUNTIME_DIR");
    char *saved = before != NULL ? strdup(before) : NULL;
    setenv("XDG_RUNTIME_DIR", base, 1);
    const int code = doctor("--runtime-dir /nonexistent/shardd");
    if (saved != NULL)
        setenv("XDG_RUNTIME_DIR", saved, 1);
    else
        unsetenv("XDG_RUNTIME_DIR");
    free(saved);
    unlink(lock);
    rmdir(run);
    rmdir(base);
    EXPECT_EQ(code, 0);
    EXPECT_STR(level_of("leftovers", "shardd-run-abc123"), "warn");
}

TEST(quiet_shows_what_is_not_ok)
{
    EXPECT_EQ(shardctl("doctor --quiet --runtime-dir /dev/null"), 1);
    EXPECT(strstr(output, "fail  runtime") != NULL);
    EXPECT(strstr(output, "-> ") != NULL);
    EXPECT(strstr(output, "\nok ") == NULL && strncmp(output, "ok ", 3) != 0);
    EXPECT(strstr(output, "1 fail\n") != NULL);
}

/* -- Completion ------------------------------------------------------------------------------ */

/* A shell's word on the script: its syntax, and what it completes. */
TEST(bash_completes_verbs_flags_and_files)
{
    static const struct {
        const char *words, *want;
    } cases[] = {
        { "shardctl do", "doctor" },
        { "shardctl doctor --check", "--checkpoint" },
        { "shardctl plan --spec /dev/nul", "/dev/null" },
        { "shardctl completion z", "zsh" },
        { "shardctl help digest", "digest" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char command[700], got[200] = "";
        snprintf(command, sizeof command,
                 "bash -c '. <(%s completion bash); COMP_WORDS=(%s); "
                 "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shardctl; echo \"${COMPREPLY[*]}\"'",
                 SHARDCTL, cases[i].words);
        FILE *f = popen(command, "re"); /* NOLINT(cert-env33-c): our own words */
        CHECK(f != NULL);
        EXPECT(fgets(got, sizeof got, f) != NULL);
        EXPECT_EQ(pclose(f), 0);
        got[strcspn(got, "\n")] = '\0';
        if (strstr(got, cases[i].want) == NULL)
            FAIL("'%s' completes to '%s', expected '%s'", cases[i].words, got, cases[i].want);
    }
}

/* Every verb of the help is in both scripts. */
TEST(completion_has_every_verb)
{
    static const char *const shells[] = { "bash", "zsh" };
    char scripts[2][OUTPUT_BYTES], args[64];
    for (size_t i = 0; i < ARRAY_SIZE(shells); i++) {
        snprintf(args, sizeof args, "completion %s", shells[i]);
        EXPECT_EQ(shardctl(args), 0);
        snprintf(scripts[i], sizeof scripts[i], "%s", output);
    }
    EXPECT_EQ(shardctl("--help"), 0);
    unsigned verbs = 0;
    char *line = strstr(output, "verbs:\n");
    EXPECT(line != NULL);
    for (line = strchr(line, '\n') + 1; strncmp(line, "  ", 2) == 0;
         line = strchr(line, '\n') + 1) {
        char verb[32], want[40];
        EXPECT(sscanf(line, " %31s", verb) == 1);
        snprintf(want, sizeof want, "    %s) ", verb);
        EXPECT(strstr(scripts[0], want) != NULL);
        snprintf(want, sizeof want, "'%s:", verb);
        EXPECT(strstr(scripts[1], want) != NULL);
        verbs++;
    }
    EXPECT(verbs >= 6);
}

TEST(completion_of_an_unknown_shell_is_refused)
{
    EXPECT_EQ(shardctl("completion"), 2);
    EXPECT_EQ(shardctl("completion fish"), 2);
    EXPECT_EQ(shardctl("completion bash zsh"), 2);
}

/* What shardctl doctor says about GPUs: without a driver, and with tests/cuda's in its place. */

static int doctor_gpu(const char *variables)
{
    return doctor_with(variables, "--runtime-dir /nonexistent");
}

/* The first finding about GPUs whose text has part in it; NULL: none. */
static const json_t *finding(const char *part)
{
    size_t i;
    const json_t *f;
    json_array_foreach(json_object_get(report, "findings"), i, f)
    {
        if (strcmp(json_string_value(json_object_get(f, "check")), "gpu") == 0 &&
            strstr(json_string_value(json_object_get(f, "found")), part) != NULL)
            return f;
    }
    return NULL;
}

static bool has_remedy(const char *part)
{
    const json_t *f = finding(part);
    return f != NULL && json_string_length(json_object_get(f, "remedy")) > 0;
}

#define SHIM "LD_LIBRARY_PATH=" SHD_SHIM_DIR " "

TEST(host_without_a_driver_is_no_fault)
{
    if (access("/proc/driver/nvidia/version", F_OK) == 0)
        SKIP("this host has a driver");
    EXPECT_EQ(doctor_gpu("LD_LIBRARY_PATH="), 0);
    EXPECT_STR(level_of("gpu", "not here"), "ok");
    EXPECT_STR(level_of("gpu", "gpu0"), "");
    EXPECT_STR(level_of("gpu", "MPS"), "");
}

TEST(driver_without_a_device_is_no_fault)
{
    if (access("/proc/driver/nvidia/version", F_OK) == 0)
        SKIP("this host has a driver");
    EXPECT_EQ(doctor_gpu(SHIM "SHIM_CUDA_DEVICES=0"), 0);
    EXPECT_STR(level_of("gpu", "not here"), "ok");
    EXPECT_EQ(doctor_gpu(SHIM "SHIM_CUDA_FAIL=cuInit@1:999"), 0);
    EXPECT_STR(level_of("gpu", "not here"), "ok");
}

TEST(each_device_is_shown)
{
    EXPECT_EQ(doctor_gpu(SHIM "SHIM_CUDA_DEVICES=3"), 0);
    EXPECT_STR(level_of("gpu", "CUDA up to"), "ok");
    EXPECT_STR(level_of("gpu", "gpu0: "), "ok");
    EXPECT_STR(level_of("gpu", "gpu2: "), "ok");
    EXPECT_STR(level_of("gpu", "gpu3: "), "");
    EXPECT_STR(level_of("gpu", "compute capability 9.0"), "ok");
    EXPECT_STR(level_of("gpu", "MPS does not run"), "ok");
    EXPECT(finding("NCCL") != NULL || finding("libnccl") != NULL);
    EXPECT(finding("cuBLAS") != NULL || finding("libcublas") != NULL);
}

TEST(device_that_cannot_hold_a_daemon_is_a_warning_with_a_remedy)
{
    static const struct {
        const char *attributes, *found;
    } cases[] = {
        { "75:8,76:9", "capability 8.9" },
        { "102:0", "virtual memory management no" },
        { "103:0", "POSIX descriptors no" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char variables[300];
        snprintf(variables, sizeof variables, SHIM "SHIM_CUDA_ATTRIBUTE=%s", cases[i].attributes);
        EXPECT_EQ(doctor_gpu(variables), 0);
        EXPECT_STR(level_of("gpu", cases[i].found), "warn");
        EXPECT(has_remedy(cases[i].found));
    }
}

/* -- Kernels in the program ----------------------------------------------------------------------
 */

struct image { /* an ELF file with one fat binary of two entries */
    Elf64_Ehdr elf;
    Elf64_Shdr sections[3]; /* none, names, .nv_fatbin */
    char names[32];
    struct {
        uint32_t magic;
        uint16_t version, header_bytes;
        uint64_t bytes;
    } fat;
    struct {
        uint16_t kind, version;
        uint32_t header_bytes;
        uint64_t bytes;
        uint32_t compressed, options;
        uint16_t minor, major;
        uint32_t arch;
        uint8_t body[32];
    } entries[2];
};

static struct image image_new(void)
{
    struct image m = { 0 };
    memcpy(m.elf.e_ident, ELFMAG, SELFMAG);
    m.elf.e_ident[EI_CLASS] = ELFCLASS64;
    m.elf.e_shoff = offsetof(struct image, sections);
    m.elf.e_shentsize = sizeof(Elf64_Shdr);
    m.elf.e_shnum = 3;
    m.elf.e_shstrndx = 1;
    memcpy(m.names, "\0.nv_fatbin", 12);
    m.sections[1].sh_offset = offsetof(struct image, names);
    m.sections[1].sh_size = sizeof m.names;
    m.sections[2].sh_name = 1;
    m.sections[2].sh_offset = offsetof(struct image, fat);
    m.sections[2].sh_size = sizeof m - offsetof(struct image, fat);
    m.fat.magic = 0xba55ed50;
    m.fat.header_bytes = 16;
    m.fat.bytes = sizeof m.entries;
    for (uint16_t i = 0; i < 2; i++) {
        m.entries[i].kind = (uint16_t)(2 - i);
        m.entries[i].header_bytes = 32;
        m.entries[i].bytes = 32;
        m.entries[i].arch = 90;
    }
    return m;
}

/* doctor's findings when shardd is this file. */
static void look_at(const void *bytes, size_t count)
{
    char path[200], variables[300];
    snprintf(path, sizeof path, "%s/shd-doctor-XXXXXX", fixture_base());
    const int fd = mkstemp(path);
    EXPECT(fd >= 0);
    EXPECT_EQ(write(fd, bytes, count), count);
    close(fd);
    snprintf(variables, sizeof variables, SHIM "SHARDD_BIN=%s", path);
    EXPECT_EQ(doctor_gpu(variables), 0);
    unlink(path);
}

TEST(kernels_of_the_daemon_are_named)
{
    const struct image m = image_new();
    look_at(&m, sizeof m);
    EXPECT_STR(level_of("gpu", "sm_90, compute_90 (PTX)"), "ok");
}

TEST(daemon_without_kernels_on_a_host_with_a_gpu_is_a_warning)
{
    struct image m = image_new();
    m.names[2] = 'x';
    look_at(&m, sizeof m);
    EXPECT_STR(level_of("gpu", "without GPU kernels"), "warn");
    EXPECT(has_remedy("without GPU kernels"));
    look_at("#!/bin/sh\n", 10);
    EXPECT_STR(level_of("gpu", "without GPU kernels"), "warn");
}

/* Cut and bent files are looked at without harm. */
TEST(damaged_file_is_no_harm)
{
    const struct image whole = image_new();
    for (size_t count = sizeof whole - 40; count > 0; count -= count > 60 ? 60 : count)
        look_at(&whole, count);
    struct image m = whole;
    m.entries[0].bytes = UINT64_MAX - 16;
    look_at(&m, sizeof m);
    m = whole;
    m.fat.bytes = UINT64_MAX - 8;
    look_at(&m, sizeof m);
    m = whole;
    m.entries[0].header_bytes = 0;
    look_at(&m, sizeof m);
    m = whole;
    m.sections[1].sh_offset = UINT64_MAX;
    look_at(&m, sizeof m);
    m = whole;
    m.elf.e_shoff = UINT64_MAX - 64;
    look_at(&m, sizeof m);
}

TEST_MAIN()
