/* What shardctl doctor says about GPUs: without a driver, and with tests/cuda's in its place. */
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

static json_t *report;

/* Findings of `doctor` with these variables set ("A=1 B=2"); the exit code. */
static int doctor(const char *variables)
{
    char command[1200];
    snprintf(command, sizeof command,
             "%s " SHD_BIN_DIR "/shardctl doctor --json --runtime-dir /nonexistent 2>/dev/null",
             variables);
    fflush(NULL);
    FILE *f = popen(command, "re"); /* NOLINT(cert-env33-c): our own words */
    CHECK(f != NULL);
    json_decref(report);
    report = json_loadf(f, 0, NULL);
    const int status = pclose(f);
    EXPECT(json_is_object(report));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
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

static const char *level_of(const char *part)
{
    const json_t *f = finding(part);
    return f != NULL ? json_string_value(json_object_get(f, "level")) : "";
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
    EXPECT_EQ(doctor("LD_LIBRARY_PATH="), 0);
    EXPECT_STR(level_of("not here"), "ok");
    EXPECT_STR(level_of("gpu0"), "");
    EXPECT_STR(level_of("MPS"), "");
}

TEST(driver_without_a_device_is_no_fault)
{
    if (access("/proc/driver/nvidia/version", F_OK) == 0)
        SKIP("this host has a driver");
    EXPECT_EQ(doctor(SHIM "SHIM_CUDA_DEVICES=0"), 0);
    EXPECT_STR(level_of("not here"), "ok");
    EXPECT_EQ(doctor(SHIM "SHIM_CUDA_FAIL=cuInit@1:999"), 0);
    EXPECT_STR(level_of("not here"), "ok");
}

TEST(each_device_is_shown)
{
    EXPECT_EQ(doctor(SHIM "SHIM_CUDA_DEVICES=3"), 0);
    EXPECT_STR(level_of("CUDA up to"), "ok");
    EXPECT_STR(level_of("gpu0: "), "ok");
    EXPECT_STR(level_of("gpu2: "), "ok");
    EXPECT_STR(level_of("gpu3: "), "");
    EXPECT_STR(level_of("compute capability 9.0"), "ok");
    EXPECT_STR(level_of("MPS does not run"), "ok");
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
        EXPECT_EQ(doctor(variables), 0);
        EXPECT_STR(level_of(cases[i].found), "warn");
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
    EXPECT_EQ(doctor(variables), 0);
    unlink(path);
}

TEST(kernels_of_the_daemon_are_named)
{
    const struct image m = image_new();
    look_at(&m, sizeof m);
    EXPECT_STR(level_of("sm_90, compute_90 (PTX)"), "ok");
}

TEST(daemon_without_kernels_on_a_host_with_a_gpu_is_a_warning)
{
    struct image m = image_new();
    m.names[2] = 'x';
    look_at(&m, sizeof m);
    EXPECT_STR(level_of("without GPU kernels"), "warn");
    EXPECT(has_remedy("without GPU kernels"));
    look_at("#!/bin/sh\n", 10);
    EXPECT_STR(level_of("without GPU kernels"), "warn");
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
