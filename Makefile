# A thin front of CMake: every target does its own set-up on a bare Debian 12.
PRESET ?= release
BUILD := $(if $(filter release,$(PRESET)),build,build-$(PRESET))
JOBS ?= $(shell nproc)

.PHONY: all setup configure build demo check check-asan bundle docs format clean

all: build

setup:
	@./cmake/setup-debian.sh

configure: setup
	@cmake --preset $(PRESET) >/dev/null

build: configure
	@ninja -C $(BUILD) -j$(JOBS)

# A Mamba-1 and a Mamba-2 block on real hidden states.
demo: configure
	@ninja -C $(BUILD) -j$(JOBS) corey-demo
	@$(BUILD)/bin/corey-demo docs/examples test/Inputs

# Everything that is tested. A library with sanitizers needs an interpreter with
# them.
check: build
	@ninja -C $(BUILD) check-corey
	@$(if $(filter release,$(PRESET)),./python/check.sh $(BUILD))

# The same under AddressSanitizer and UndefinedBehaviorSanitizer.
check-asan:
	@./cmake/setup-debian.sh
	@ASAN_OPTIONS=allocator_may_return_null=1 \
	 LSAN_OPTIONS=suppressions=$(CURDIR)/test/lsan.supp:print_suppressions=0 \
	 $(MAKE) PRESET=asan check

# The executable with its links, libraries and GPU tests, for machines without
# LLVM.
bundle: configure
	@ninja -C $(BUILD) -j$(JOBS) corey corey-gpu-tests
	@./cmake/make-bundle.sh $(BUILD)

docs: configure
	@ninja -C $(BUILD) mlir-doc
	@echo "pages of the dialect and the passes: $(BUILD)/docs"

format:
	@command -v clang-format-22 >/dev/null || apt-get install -y -qq --no-install-recommends clang-format-22 >/dev/null
	@git ls-files '*.h' '*.cpp' '*.c' | xargs clang-format-22 -i

clean:
	rm -rf build build-*
