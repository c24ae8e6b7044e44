/* Which GPUs a program has kernels for: section .nv_fatbin of the file, read as cuobjdump -lelf
 * would. NVIDIA does not document the format; what is read here (a header of 16 bytes, entries with
 * kind, sizes and architecture in their first 32) has not changed since CUDA 5. */
#include "client/ctl/doctor/doctor_fatbin.h"

#include <assert.h>
#include <elf.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"

#define FATBIN_MAGIC UINT32_C(0xba55ed50)
enum { FATBIN_PTX = 1, FATBIN_ELF = 2 };

struct fatbin_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* behind the header */
};
struct fatbin_entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes; /* behind the header */
    uint32_t compressed_bytes, options;
    uint16_t minor, major;
    uint32_t arch; /* 90 */
};
static_assert(sizeof(struct fatbin_entry) == 32, "as in the file");

struct bytes {
    const uint8_t *at;
    uint64_t count;
};

static bool take(struct bytes b, uint64_t offset, void *out, size_t count)
{
    if (offset > b.count || count > b.count - offset)
        return false;
    memcpy(out, b.at + offset, count);
    return true;
}

static void add_arch(char *out, size_t bytes, const struct fatbin_entry *e)
{
    char word[32];
    snprintf(word, sizeof(word), e->kind == FATBIN_ELF ? "sm_%u" : "compute_%u (PTX)", e->arch);
    const size_t used = strlen(out);
    if (strstr(out, word) == NULL)
        snprintf(out + used, bytes - used, "%s%s", used > 0 ? ", " : "", word);
}

/* Fat binaries lie one behind the other, aligned to 8. */
static void list_archs(struct bytes section, char *out, size_t bytes)
{
    struct fatbin_header header;
    struct fatbin_entry entry;
    uint64_t at = 0;
    while (take(section, at, &header, sizeof(header)) && header.magic == FATBIN_MAGIC) {
        if (header.header_bytes < sizeof(header) ||
            header.bytes > section.count - at - sizeof(header))
            return;
        const uint64_t end = at + header.header_bytes + header.bytes;
        uint64_t entry_at = at + header.header_bytes;
        while (entry_at < end && take(section, entry_at, &entry, sizeof(entry)) &&
               entry.header_bytes >= sizeof(entry) && entry.bytes <= section.count) {
            if (entry.kind == FATBIN_ELF || entry.kind == FATBIN_PTX)
                add_arch(out, bytes, &entry);
            entry_at += entry.header_bytes + entry.bytes;
        }
        at = (end + 7) / 8 * 8;
    }
}

static bool find_section(struct bytes file, const char *name, struct bytes *ret_section)
{
    Elf64_Ehdr elf;
    Elf64_Shdr names, section;
    if (!take(file, 0, &elf, sizeof(elf)) || memcmp(elf.e_ident, ELFMAG, SELFMAG) != 0 ||
        elf.e_ident[EI_CLASS] != ELFCLASS64 || elf.e_shentsize != sizeof(section) ||
        !take(file, elf.e_shoff + (uint64_t)elf.e_shstrndx * sizeof(names), &names, sizeof(names)))
        return false;
    for (uint16_t i = 0; i < elf.e_shnum; i++) {
        char text[16];
        if (take(file, elf.e_shoff + (uint64_t)i * sizeof(section), &section, sizeof(section)) &&
            take(file, names.sh_offset + section.sh_name, text, strlen(name) + 1) &&
            memcmp(text, name, strlen(name) + 1) == 0 && section.sh_offset < file.count &&
            section.sh_size <= file.count - section.sh_offset) {
            *ret_section = (struct bytes){ file.at + section.sh_offset, section.sh_size };
            return true;
        }
    }
    return false;
}

bool doctor_fatbin(const char *path, char *buf, size_t bytes)
{
    struct stat st;
    struct bytes section;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    const bool known = fstat(fd, &st) == 0 && st.st_size > 0;
    void *base = known ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    close(fd);
    if (base == MAP_FAILED)
        return false;
    buf[0] = '\0';
    if (find_section((struct bytes){ base, (uint64_t)st.st_size }, ".nv_fatbin", &section))
        list_archs(section, buf, bytes);
    munmap(base, (size_t)st.st_size);
    return true;
}
